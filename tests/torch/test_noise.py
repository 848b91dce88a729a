"""The noise: known answers of Philox4x32-10, independence of everything but its key, Gumbel's law, and no infinity."""

from __future__ import annotations

import math

import pytest
import torch

from topo_search.decode.noise import _gumbel, gumbel_at, gumbel_rows, philox

ALL = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((ALL, ALL, ALL, ALL), (ALL, ALL), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], words: str) -> None:
    c0, c1, c2, c3 = (torch.tensor(word) for word in counter)
    assert " ".join(f"{int(word):08x}" for word in philox((c0, c1, c2, c3), key)) == words


def rows(*places: tuple[int, int], seed: int = 5, vocab: int = 103) -> torch.Tensor:
    requests, positions = (torch.tensor(part) for part in zip(*places, strict=True))
    return gumbel_rows(seed, requests, positions, vocab)


def test_a_place_has_its_noise_whatever_stands_beside_it() -> None:
    """Independent of batch, row and padded vocabulary."""
    together = rows((2, 7), (0, 3), (2, 8))
    assert torch.equal(together[1:2], rows((0, 3)))
    assert torch.equal(together[:, :50], rows((2, 7), (0, 3), (2, 8), vocab=50))


def test_single_ids_have_the_noise_of_their_row() -> None:
    ids = torch.tensor([0, 1, 2, 3, 4, 50, 102])
    place = torch.full_like(ids, 9)
    assert torch.equal(gumbel_at(5, place + 1, place, ids), rows((10, 9))[0, ids])


def test_seed_request_and_position_each_change_everything() -> None:
    base = rows((1, 2))
    for other in (rows((1, 2), seed=6), rows((1, 2), seed=5 + (1 << 32)), rows((2, 2)), rows((1, 3)), rows((2, 1))):
        assert not bool((base == other).any())
    assert not bool((rows((1, 2)) == rows((1 + (1 << 32), 2))).any())


def test_the_law_is_gumbels() -> None:
    """Mean: Euler's constant; variance: pi squared over six; 60,000 draws."""
    drawn = rows(*((0, position) for position in range(60)), vocab=1000).flatten()
    assert float(drawn.mean()) == pytest.approx(0.57722, abs=0.02)
    assert float(drawn.var()) == pytest.approx(math.pi**2 / 6, abs=0.04)


def test_no_word_gives_infinite_noise() -> None:
    """MATH 2.2: in fp32 the largest 128 words round to u = 1, whose noise is infinite."""
    extremes = torch.tensor([0, 1, ALL - 127, ALL])
    noise = _gumbel(extremes)
    assert bool(torch.isfinite(noise).all())
    assert float(noise.min()) == pytest.approx(-3.13, abs=0.01)
    assert float(noise.max()) == pytest.approx(22.87, abs=0.01)
    single = ((extremes.float() + 0.5) / 2**32).float()
    assert torch.isinf(-torch.log(-torch.log(single))).tolist() == [False, False, True, True]
