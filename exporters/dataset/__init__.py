"""Request log as a data set: columns, layout, stores, and the writer of its Parquet segments."""
