"""The report page: one offline HTML file made from result dicts, the answer first.

The road is `page` → `summary` and one `section` per task → tables (`ranking`) and figures (`figures`, `examples`,
`cost`). Below them `parts` are what these are built from, `wording` is numbers and verdicts in words, `data` views of
the results, `plot`, `scale` and `markup` drawing, `style` and `colours` the look. Every piece is `Html`; text from
results is escaped by `markup.tag`. Tables are over all seeds, a figure shows the first one.
"""

from bayesformer.bench.report.page import write_report

__all__ = ["write_report"]
