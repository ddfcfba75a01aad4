"""Python code is ended from outside wherever it stands, but not in the middle of an import."""

import sys
import threading

from course_lib.ranks.stopping import in_import, is_importing, raise_in_thread


def test_an_import_goes_on_to_its_end(tmp_path, monkeypatch) -> None:
    class Stop(BaseException):
        pass

    (tmp_path / "waits_in_its_import.py").write_text("import sys\nsys.imported_half.wait(300)\n")
    half = threading.Event()
    monkeypatch.setattr(sys, "imported_half", half, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    ended = threading.Event()

    def load() -> None:
        try:
            __import__("waits_in_its_import")
            while True:
                pass
        except Stop:
            ended.set()

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    assert thread.ident is not None
    while not is_importing(thread.ident):
        pass
    raise_in_thread(thread, Stop)
    half.set()
    while is_importing(thread.ident):
        pass
    assert "waits_in_its_import" in sys.modules
    assert not ended.is_set()
    raise_in_thread(thread, Stop)
    assert ended.wait(300)
    assert not in_import(sys._getframe())
