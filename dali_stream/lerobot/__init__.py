"""Readers of LeRobot datasets: metadata, features, episodes, tasks, statistics and Parquet rows."""
