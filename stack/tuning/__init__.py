"""Effect of a change: experiments, comparisons of saved runs and of live traffic, and the report."""
