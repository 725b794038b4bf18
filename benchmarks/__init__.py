"""Benchmarks of headwise beside other libraries; every result is checked before it is timed.

    python -m benchmarks                          every case for the CPU
    python -m benchmarks --device cuda            every case for the GPU
    python -m benchmarks --only 'window*'         some cases
    python -m benchmarks --part 2/3               the second of three parts, into the same file
    python -m benchmarks --seconds 540 --missing  those that this commit has not stored yet; none after 540 s
    python -m benchmarks --list                   their names
    python -m benchmarks --quick                  tiny sizes, few turns: is everything in order?
    python -m benchmarks --readme                 README's line and docs/benchmarks.md, from what is stored
    python -m benchmarks.everyday                 what people do every day, as felt; --device cuda on a GPU
    python -m benchmarks.pages                    the page of heads beside BertViz's: bytes, seconds
    python -m benchmarks.served                   the live page: a keystroke to the redrawn page, bytes
    python -m benchmarks.rules --device cuda      every rule beside FlexAttention and SDPA
    python -m benchmarks.sweep --device cuda      from a thousand tokens to a million
    python -m benchmarks.sweep --plot             their table and picture again, from the stored results

The rooms:

    registry.py   a case: sizes, arms, truth; the list of them
    cases/        the cases
    problem.py    q, k, v and who sees whom, and the plain truth about any of their rows
    truths.py     the plain truth about what is summed over rows: statistics, pictures, gradients
    peers.py      the dense routes headwise is compared with
    verdicts.py   is an arm right? nothing wrong is ever timed
    runner.py     arms in turn, in changing order; medians, ratios, and the peer against itself
    memory.py     the extra memory of one call, at its peak
    machine.py    what it ran on
    report.py     results as JSON, one file per device and month
    page.py       docs/benchmarks.md from those files; readme.py: README's line of speed, parts of tables
    everyday.py   what people do every day, as felt; everyday_cases.py: which; everyday_table.py: its tables
    rules.py      every rule on a GPU; rule_cell.py: one cell, checked and timed; rule_table.py: its table
    flex.py       the rules as headwise and as FlexAttention take them, and the peers
    replays.py    GPU time by CUDA graphs, arms in turn; the time a caller feels
    sweep.py      everything a map tells, at every length; lengths.py: its table and its picture
    pages.py      the page of heads: bytes, seconds to write, to the first picture, of the longest frame
    served.py     the live page: milliseconds from a keystroke to the redrawn page, bytes
    progress.py   what is going on, with rich or without
"""
