import pytest
from torch.utils.data import DataLoader

from lightning_parm.data import ElasticSampler


def run(length, size, batch_size, start, steps, workers=0):
    """Return the indices that all ranks take in some steps, step by step."""
    iterators = [
        iter(
            DataLoader(
                range(length), batch_size, sampler=ElasticSampler(length, rank, size, start=start), num_workers=workers
            )
        )
        for rank in range(size)
    ]
    return [{int(x) for iterator in iterators for x in next(iterator)} for _ in range(steps)]


def test_steps_hold_the_same_samples_on_any_ranks_workers_and_batches():
    whole = list(ElasticSampler(1000))
    consumed = 0
    for size, batch_size, workers, steps in [(4, 2, 0, 5), (3, 1, 1, 7), (1, 13, 0, 3), (2, 4, 2, 6)]:
        for indices in run(1000, size, batch_size, consumed, steps, workers):
            assert indices == set(whole[consumed : consumed + size * batch_size])
            consumed += size * batch_size


def test_epochs_differ_and_hold_everything():
    sampler = ElasticSampler(50, seed=3)
    first, second = list(sampler), sampler.at(range(50, 100)).tolist()
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert list(ElasticSampler(5, shuffle=False)) == [0, 1, 2, 3, 4]


def test_its_state_is_checked():
    sampler = ElasticSampler(50)
    sampler.load_state_dict(sampler.state_dict(consumed=20))
    assert (sampler.start, len(sampler)) == (20, 30)
    with pytest.raises(ValueError, match="length=50 and the sampler has length=51"):
        ElasticSampler(51).load_state_dict(sampler.state_dict(0))
    with pytest.raises(ValueError, match="seed=0 and the sampler has seed=1"):
        ElasticSampler(50, seed=1).load_state_dict(sampler.state_dict(0))


def test_arguments_out_of_range():
    with pytest.raises(ValueError, match="length=0: there is nothing"):
        ElasticSampler(0)
    with pytest.raises(ValueError, match="rank=2 is not below size=2"):
        ElasticSampler(5, 2, 2)
