"""The two checks of fastcore that the lessons use."""


def test_eq(a, b):
    assert a == b, f"==:\n{a}\n{b}"


def test_fail(f, msg="", contains="", exc=Exception):
    "Fails unless f() raises an error whose text contains these words."
    try:
        f()
    except exc as error:
        assert not contains or contains in str(error)
        return
    raise AssertionError(f"Expected {exc.__name__} but none raised. {msg}")
