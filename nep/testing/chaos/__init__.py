"""The chaos suite: every kind of failure in every phase of a step, on one slot and on several at once.

    python -m nep.testing.chaos --help

`cases` says what there is, `victims` which slots fail, `script` makes them fail inside a job, `play` runs jobs,
`verdict` compares what they left with the reference, `page` writes docs/reliability.md.
"""
