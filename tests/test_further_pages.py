"""The pages in lectures/further execute from scratch: so long that a worker is theirs."""

import pytest

from tests.helpers.course_folders import FURTHER
from tests.helpers.printed_again import executed_again


@pytest.mark.large
@pytest.mark.parametrize("path", FURTHER, ids=lambda path: path.stem)
def test_a_page_executes(path, tmp_path) -> None:
    assert not (found := executed_again(path, tmp_path)), "\n".join(found)
