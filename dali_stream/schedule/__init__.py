"""What happens when: computed from the order, before any of it is done. Pure: no I/O, no threads, no clock."""
