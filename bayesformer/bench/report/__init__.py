"""The report page: one offline HTML file made from result dicts, the answer first.

`page` calls `curve_figure` for the opening picture, `findings` for the first section, `belief` for what the fits found
out about themselves and `section` for one per task; these call `ranking` for tables and `figures`, `examples`,
`attention_figure`, `trace_figure` and `cost_figure` for figures. `parts` holds what tables and figures are built from,
`wording` turns numbers and verdicts into words, `data` groups the results, `plot`, `axis` and `markup` draw, `style`
and `colours` set the look. Every piece is `Html`; text from results is escaped by `markup.tag`. Tables are over all
seeds, a figure shows the first one.
"""

from bayesformer.bench.report.page import write_report

__all__ = ["write_report"]
