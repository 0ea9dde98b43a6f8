"""What a LeRobot dataset says of itself: metadata, features, episodes, tasks, statistics and Parquet rows."""
