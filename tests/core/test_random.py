"Random generators: independent streams, states that come back, and one stream in several processes."

import copy

import pytest
import torch

from instruct_goose.core.processes import in_processes, rank, rank_slice
from instruct_goose.core.random import (
    EVALUATION_STREAM,
    Generators,
    RandomState,
    ShardedGenerator,
    generator,
    stage_seed,
    torch_threads,
    uniforms,
)


def draw(*generators, n=4):
    return [torch.rand(n, generator=g).tolist() for g in generators]


def test_streams_and_seeds_do_not_meet():
    pairs = [(0, 0), (0, 1), (0, EVALUATION_STREAM), (1, 0), (2**44 - 1, EVALUATION_STREAM)]
    numbers = [tuple(draw(generator(seed, stream))[0]) for seed, stream in pairs]
    assert len(set(numbers)) == len(pairs)
    assert draw(generator(3, 1)) == draw(generator(3, 1))


@pytest.fixture
def generators():
    return Generators(seed=5)


def test_a_trainers_generators_are_the_first_two_streams_of_its_seed(generators):
    expected = [torch.Generator().manual_seed(5 * 2**20 + stream) for stream in (0, 1)]
    assert draw(generators.sampling, generators.shuffling) == draw(*expected)


def test_each_generator_goes_on_where_its_state_was_read(generators):
    draw(generators.sampling, generators.shuffling)
    state = generators.state_dict()
    expected = draw(generators.sampling, generators.shuffling, None)

    other = Generators(seed=99)
    torch.manual_seed(99)
    other.load_state_dict(state)

    assert draw(other.sampling, other.shuffling, None) == expected


def test_checking_a_state_moves_no_generator(generators):
    state = Generators(seed=99).state_dict()
    twin = copy.deepcopy(generators.state_dict())

    generators.check_state_dict(state)

    after = generators.state_dict()
    assert all(torch.equal(after[name], x) for name, x in twin.items())


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda state: state.pop("sampling"), "sampling is missing"),
        (lambda state: state.update(more=torch.ones(1)), "more is new"),
        (lambda state: state.update(sampling=state["sampling"][:-1]), "sampling is "),
        (lambda state: state.update(python=state["python"] + 10**6), "malformed"),
    ],
)
def test_the_state_of_other_generators_is_refused_and_nothing_moves(generators, change, message):
    state = generators.state_dict()
    change(state)
    before = generators.state_dict()
    with pytest.raises(ValueError, match=message):
        generators.check_state_dict(state)
    with pytest.raises(ValueError, match=message):
        generators.load_state_dict(state)
    after = generators.state_dict()
    assert all(torch.equal(after[name], x) for name, x in before.items())


def test_a_state_without_own_generators_holds_the_global_ones():
    assert {"torch", "python", "numpy"} <= RandomState().state_dict().keys()
    assert {"mine"} <= RandomState({"mine": torch.Generator()}).state_dict().keys()


ROWS = 5


def draw_share(draws_by_rank):
    shared = generator(0, 0)
    own = ShardedGenerator(shared, ROWS, rank_slice(ROWS))
    draws = draws_by_rank[rank()]
    numbers = [uniforms(own.own_rows.stop - own.own_rows.start, own).tolist() for _ in range(draws)]
    private = torch.rand(1, generator=own).item()
    own.catch_up(max(draws_by_rank))
    return numbers, private, torch.rand(1, generator=shared).item()


def test_processes_draw_the_numbers_that_one_process_draws():
    alone = generator(0, 0)
    table = torch.stack([uniforms(ROWS, alone) for _ in range(3)])

    (first, _, first_after), (second, _, second_after) = in_processes(2, draw_share, (3, 2))

    assert first == table[:, :2].tolist()
    assert second == table[:2, 2:].tolist()
    assert first_after == second_after == torch.rand(1, generator=alone).item()


def test_a_sharded_generator_used_as_a_plain_one_has_its_process_own_numbers():
    (_, first, first_after), (_, second, second_after) = in_processes(2, draw_share, (0, 0))

    assert first != second
    assert first_after == second_after  # the shared generator has moved on all the same
    assert first_after != torch.rand(1, generator=generator(0, 0)).item()


def crc32(data):
    "The checksum bit by bit: the remainder modulo the reflected polynomial 0xEDB88320."
    remainder = 0xFFFFFFFF
    for byte in data:
        remainder ^= byte
        for _ in range(8):
            remainder = remainder >> 1 ^ (0xEDB88320 if remainder & 1 else 0)
    return remainder ^ 0xFFFFFFFF


def test_the_seed_of_a_stage_is_a_checksum_of_seed_and_name():
    assert stage_seed(7, "sft") == crc32(b"7/sft")
    assert stage_seed(7, "sft") != stage_seed(8, "sft")


def test_the_number_of_threads_comes_back_after_an_error():
    before = torch.get_num_threads()
    with pytest.raises(KeyError), torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise KeyError
    assert torch.get_num_threads() == before
