"""Running a study: on one machine or many, killed at any moment, going on where it was.

- `launch`: works on a study's runs until none is left, in `rounds`, with its `progress`
- `backends`: where: this process, processes of this host, a Ray cluster; `shards` for job arrays;
  `gpus`: one run to each
- `runs`: one run, claimed, trained and recorded; `records`: a study and its runs, read back
- `directories`: what stands in a run's directory; `outcomes`: what came of the run, read from
  there; `environment`: where it was made
- `claims`: one process at a time works on a run; `signals`: how it is asked to stop
"""
