"""What a change did: experiments, the judge, comparisons of saved runs and of live traffic, and the report."""
