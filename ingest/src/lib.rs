//! Topics into Parquet files of a volume, exactly once.
