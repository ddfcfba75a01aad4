"""Lossy compression: gradients that need fewer bytes, and are not exactly the same.

    >>> from course_lib.compression import ErrorFeedback, TopK
    >>> compressor = ErrorFeedback(TopK(0.01))
    >>> payload = compressor.encode(gradient)  # payload.nbytes are sent

Read in this order:

- `payload`: the bytes that are sent, and the interface of a compressor
- `bits`: several numbers in a byte
- `one_bit`: signs only
- `uniform_8bit`: eight bits, rounded to the nearest value or at random
- `triton_kernels`: `one_bit` and `uniform_8bit` on a GPU, one kernel instead of nine passes
- `qsgd`: a few levels, right on average
- `top_k`, `random_k`: a few elements
- `power_sgd`: a few directions
- `error_feedback`: nothing is lost, it is only sent later
- `all_reduce`: the sum of compressed tensors, in two phases
- `hook`: compression in DistributedDataParallel
"""

from course_lib.compression.all_reduce import compressed_all_reduce
from course_lib.compression.error_feedback import ErrorFeedback
from course_lib.compression.hook import CompressionState, compression_hook
from course_lib.compression.one_bit import OneBit
from course_lib.compression.payload import Compressor, Payload
from course_lib.compression.power_sgd import PowerSGD
from course_lib.compression.qsgd import QSGD
from course_lib.compression.random_k import RandomK
from course_lib.compression.top_k import TopK
from course_lib.compression.uniform_8bit import Uniform8Bit
