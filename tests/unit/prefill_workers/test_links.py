"""The header that precedes every payload."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ChainError
from baton.types import Epoch, JobId, TokenRange
from prefill_workers.links import HEADER_BYTES, LinkHeader, LinkStatus

_count = st.integers(0, 2**40)
_ranges = st.tuples(_count, _count).map(lambda ends: TokenRange(*sorted(ends)))
_headers = st.builds(LinkHeader, _count, _count, _count, _ranges, st.sampled_from(LinkStatus), _count)


@given(_headers)
def test_header_survives_packing(header: LinkHeader) -> None:
    assert len(header.pack()) == HEADER_BYTES
    assert LinkHeader.unpack(header.pack()) == header


def test_bare_header_announces_no_payload() -> None:
    header = LinkHeader.bare(Epoch(3), JobId(4), LinkStatus.ABORT)
    assert (header.epoch, header.job, header.status, header.num_bytes) == (3, 4, LinkStatus.ABORT, 0)


@pytest.mark.parametrize(("field", "value"), [(0, 1), (4, -1), (4, 10), (6, 9), (6, -1), (7, -5)])
def test_what_is_no_header_is_refused(field: int, value: int) -> None:
    packed = LinkHeader(Epoch(1), JobId(2), 3, TokenRange(4, 5), LinkStatus.DATA, 6).pack()
    values = list(struct.unpack("<8q", packed))
    values[field] = value
    with pytest.raises(ChainError, match="no valid header"):
        LinkHeader.unpack(struct.pack("<8q", *values))
