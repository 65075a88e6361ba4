"Checks of numbers on a GPU: collected, and read together. A tensor that says it is there stands in."

import pytest
import torch

from instruct_goose.core.tensor_checks import DeferredChecks, deferred_checks, refuse_if


class OnGPU(torch.Tensor):
    "A tensor of the CPU that answers as one on a GPU does."

    @property
    def is_cuda(self):
        return True


def on_gpu(is_wrong):
    return torch.tensor(is_wrong).as_subclass(OnGPU)


def error(text):
    return lambda: ValueError(text)


@pytest.mark.parametrize("make", [torch.tensor, on_gpu])
def test_outside_a_block_a_wrong_number_is_refused_at_once(make):
    refuse_if(make(False), error("not this"))
    with pytest.raises(ValueError, match="this"):
        refuse_if(make(True), error("this"))


def test_inside_a_block_only_numbers_on_a_gpu_wait():
    reached = []
    with pytest.raises(ValueError, match="at the end"), deferred_checks():
        refuse_if(on_gpu(True), error("at the end"))
        reached.append("the GPU's number waits")
    with pytest.raises(ValueError, match="now"), deferred_checks():
        refuse_if(torch.tensor(True), error("now"))
        reached.append("the CPU's number does not")
    assert reached == ["the GPU's number waits"]


def test_the_first_check_that_failed_gives_the_error():
    with pytest.raises(ValueError, match="second"), deferred_checks():
        refuse_if(on_gpu(False), error("first"))
        refuse_if(on_gpu(True), error("second"))
        refuse_if(on_gpu(True), error("third"))


def test_a_block_that_fails_by_itself_is_not_blamed_on_its_checks():
    with pytest.raises(KeyError), deferred_checks():
        refuse_if(on_gpu(True), error("would follow from it"))
        raise KeyError


def test_checks_are_read_once():
    with deferred_checks() as checks:
        refuse_if(on_gpu(True), error("early"))
        with pytest.raises(ValueError, match="early"):
            checks.read()  # and not again at the end of the block
    DeferredChecks().read()  # with nothing to read


def test_an_error_may_look_at_numbers_itself():
    def looks():
        refuse_if(on_gpu(True), error("found while looking"))
        return ValueError("never made")

    with pytest.raises(ValueError, match="found while looking"), deferred_checks():
        refuse_if(on_gpu(True), looks)


def test_an_inner_block_reads_its_own_checks():
    with deferred_checks():
        with pytest.raises(ValueError, match="inner"), deferred_checks():
            refuse_if(on_gpu(True), error("inner"))
        refuse_if(on_gpu(False), error("outer"))
    with pytest.raises(ValueError, match="at once again"):
        refuse_if(on_gpu(True), error("at once again"))
