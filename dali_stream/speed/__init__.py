"""Speed of a loader: what limits it, what a change would bring, and how many frames a schedule decodes.

bottleneck    finds the stage that limits a running loader, and the change that would help most
model         computes the seconds per batch from the work of a batch and the resources that do it
decodes       counts the decoded frames of a schedule, by planning its batches without data
"""
