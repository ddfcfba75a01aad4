"""A process group around gloo or NCCL that shows and logs every operation."""
