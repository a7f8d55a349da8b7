"""What `report` is made of, in the order in which it is made.

- `statistics`: paired differences, intervals, Holm's correction
- `summary`: a row for each condition
- `findings`: rows in sentences; `tables`: in Markdown, CSV and for the terminal
- `plots`: the pictures, of `plot_scores`, `plot_factors` and `plot_curves` in one `plot_style`
- `setting`: what was run; `cost`: what it took
"""
