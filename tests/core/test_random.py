"The random numbers of rows that several processes share are those that one process draws."

import torch

from instruct_goose.core.random import ShardedGenerator, uniforms


def shared(seed=3):
    return torch.Generator().manual_seed(seed)


def test_each_shard_draws_the_numbers_of_its_own_rows():
    alone = shared()
    first = ShardedGenerator(shared(), 7, slice(0, 3))
    rest = ShardedGenerator(shared(), 7, slice(3, 7))
    for _ in range(4):
        together = torch.cat([uniforms(3, first), uniforms(4, rest)])
        assert together.equal(uniforms(7, alone))


def test_a_shard_that_stops_early_leaves_the_shared_generator_where_one_process_leaves_it():
    alone, short, long = shared(), shared(), shared()
    for _ in range(4):
        uniforms(7, alone)
    first = ShardedGenerator(short, 7, slice(0, 3))
    rest = ShardedGenerator(long, 7, slice(3, 7))
    uniforms(3, first)
    for _ in range(4):
        uniforms(4, rest)
    first.catch_up(4)
    rest.catch_up(4)
    assert short.get_state().equal(alone.get_state())
    assert long.get_state().equal(alone.get_state())


def test_a_sampler_that_draws_no_uniform_numbers_moves_the_shared_generator_too():
    generator = shared()
    ShardedGenerator(generator, 7, slice(0, 3)).catch_up(0)
    assert not generator.get_state().equal(shared().get_state())
