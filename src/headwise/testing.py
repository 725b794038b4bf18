"""For tests: `assert_attention` fails and names the mistake.

It works with pytest, and without it:

    from headwise.testing import assert_attention

    def test_my_attention():
        assert_attention(MyMultiHeadAttention)
"""

from __future__ import annotations

__all__ = ["assert_attention"]


def assert_attention(
    obj: object,
    *,
    roles: dict[str, str] | None = None,
    d_model: int | None = None,
    num_heads: int | None = None,
) -> None:
    """Pass if `obj` is multi-head attention; otherwise fail with the report of `headwise check`.

    The code runs in this process, as tests do.

    Args:
        obj: a class, an `nn.Module`, or a function of q, k, v.
        roles, d_model, num_heads: as for `hw.check`.

    Raises:
        AssertionError: it is not; the message names the mistake, its line and the repair.
        ArgumentError: something that cannot be checked.
    """
    __tracebackhide__ = True  # pytest then points at the test's own line
    from .examiner import check
    from .examiner.report_formats import as_text

    report = check(obj, roles=roles, d_model=d_model, num_heads=num_heads)
    if not report.ok:
        raise AssertionError(as_text(report))
