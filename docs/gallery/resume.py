"""A resume on another number of ranks: one process reads a part of an epoch, and two processes read the rest."""

import matplotlib.pyplot as plt

import dali_stream

dataset = dali_stream.Dataset("demo", cameras=[])  # rows only
common = {"seed": 1, "consumers": 16, "last_batch": "partial"}

with dali_stream.Loader(dataset, batch_size=16, **common) as loader:
    uninterrupted = [batch["index"].tolist() for batch in loader]

with dali_stream.Loader(dataset, batch_size=16, **common) as loader:
    batches = iter(loader)
    before = [next(batches)["index"].tolist() for _ in range(8)]
    state = loader.state_dict()

ranks = []
for rank in range(2):  # in practice, these are two processes, each with half of a batch
    with dali_stream.Loader(dataset, batch_size=8, rank=rank, world_size=2, **common) as loader:
        loader.load_state_dict(state)
        print(f"rank {rank} continues at batch {loader.batch_index}")
        ranks.append([batch["index"].tolist() for batch in loader])

seen = [index for batch in before for index in batch]
seen += [index for rank in ranks for batch in rank for index in batch]
print(f"{len(seen)} samples of {dataset.num_frames} frames, {len(set(seen))} different ones")
after = [sorted(first + second) for first, second in zip(*ranks, strict=True)]
print("the batches are those of an uninterrupted epoch:", after == [sorted(batch) for batch in uninterrupted[8:]])

figure, axis = plt.subplots(figsize=(8, 3.2), layout="constrained")
runs = {"1 rank": (0, before), "rank 0 of 2": (8, ranks[0]), "rank 1 of 2": (8, ranks[1])}
for label, (start, batches) in runs.items():
    points = [(start + number, index) for number, batch in enumerate(batches) for index in batch]
    axis.scatter(*zip(*points, strict=True), s=6, label=label)
axis.set(xlabel="batch", ylabel="frame of the dataset")
axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
figure.savefig("resume.png")
