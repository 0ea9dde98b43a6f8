"""What the schedule says to hold in memory. Nothing here decides."""
