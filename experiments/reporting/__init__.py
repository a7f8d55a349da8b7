"""What `report` is made of, in the order in which it is made.

- `statistics`: paired differences, intervals, Holm's correction, equivalence, correlation, power,
  means of replicas
- `comparisons`: what a study's contrasts compare; `summary`: a row for each condition; `chance`:
  all pairs of replicas
- `findings`: rows in sentences; `tables`: in Markdown, CSV and for the terminal; `score_tables`:
  the sections of a report that compare
- `reported`: a report read back, to be made again from its runs.csv
- `plots`: the pictures, of `plot_scores`, `plot_factors` and `plot_curves` in one `plot_style`
- `setting`: what was run; `cost`: what it took
"""
