from __future__ import annotations

import numpy as np
import pytest
from factories import latency_table, timing

from topo_search.cost import OUT_OF_MEMORY, Timing
from topo_search.errors import InputError


def test_a_step_is_its_verify_and_its_draft_time_at_every_context() -> None:
    table = latency_table({1: 10.0, 3: 12.0}, [0.5, 0.75], contexts={100: 1.0, 900: 2.0})
    assert table.contexts() == [100, 900]
    assert table.widths() == [1, 3]
    assert table.step_ms(verify_width=3, depth=2).tolist() == [12.75, 24.75]


def test_plain_decoding_runs_no_head() -> None:
    assert latency_table({1: 10.0}, [0.5]).step_ms(verify_width=1, depth=0).tolist() == [10.0]
    assert latency_table({1: 10.0}, []).draft_ms(0) == 0.0


def test_a_width_counts_only_when_every_context_has_it() -> None:
    table = latency_table({1: 10.0, 2: 11.0, 3: 12.0, 4: 13.0}, contexts={100: 1.0, 900: 2.0})
    del table.verify[1, 900, 2]
    table.verify[1, 100, 4] = Timing(median_ms=None, p10_ms=None, p90_ms=None, count=0, status=OUT_OF_MEMORY)
    assert table.widths() == [1, 3]
    for width in (2, 4, 5):
        with pytest.raises(InputError, match=f"no time for verify width {width} at batch 1; measured: 1, 3"):
            table.step_ms(verify_width=width, depth=1)


def test_a_draft_depth_without_a_time_is_refused() -> None:
    table = latency_table({1: 10.0, 2: 11.0}, [0.5])
    table.draft[1, 2] = Timing(median_ms=None, p10_ms=None, p90_ms=None, count=0, status=OUT_OF_MEMORY)
    for depth in (2, 3):
        with pytest.raises(InputError, match=f"no draft time for depth {depth}"):
            table.step_ms(verify_width=2, depth=depth)


def test_batches_never_mix() -> None:
    """FIELD-CASES 28: a time holds for the batch it was measured at."""
    table = latency_table({1: 10.0, 2: 11.0}, [0.5])
    table.verify[4, 32, 2], table.draft[4, 1] = timing(40.0), timing(3.0)
    assert (table.contexts(), table.widths()) == ([16], [1, 2])
    assert (table.contexts(4), table.widths(4)) == ([32], [2])
    assert table.step_ms(verify_width=2, depth=1, batch=4).tolist() == [43.0]
    with pytest.raises(InputError, match="width 1 at batch 4; measured: 2"):
        table.step_ms(verify_width=1, depth=0, batch=4)
    with pytest.raises(InputError, match="at batch 2; measured: none"):
        table.step_ms(verify_width=1, depth=0, batch=2)


def test_the_nearest_context_is_the_smaller_one_between_two() -> None:
    table = latency_table({1: 10.0}, contexts={300: 1.0, 100: 1.0, 200: 1.0})
    found = table.nearest_context(np.array([0, 149, 150, 151, 250, 251, 9999]))
    assert found.tolist() == [0, 0, 0, 1, 1, 2, 2]
