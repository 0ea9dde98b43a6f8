"""Augmentation that can be repeated: the same position of the order gets the same pixels in every run."""

import matplotlib.pyplot as plt

import dali_stream
from dali_stream import augment

camera = "observation.images.top"


def graph(nodes: dict) -> dict:
    """Keep the frame, and add an augmented one."""
    draw = augment.Draw(nodes["sample"])
    frame = augment.random_resized_crop(nodes[camera], draw, size=(120, 160), scale=(0.4, 0.9))
    frame = augment.random_rotation(frame, draw, degrees=10)
    frame = augment.color_jitter(frame, draw, brightness=0.3, contrast=0.3, saturation=0.5, hue=0.1)
    return {camera: nodes[camera], "augmented": augment.random_erasing(frame, draw, value=0.5)}


def run(seed: int) -> dict:
    """Return the first batch of a new run."""
    dataset = dali_stream.Dataset("demo", cameras=[camera])
    with dali_stream.Loader(dataset, batch_size=4, seed=seed, dali_graph=graph, device="cpu") as loader:
        return next(iter(loader))


first, again, other = run(seed=0), run(seed=0), run(seed=1)
print("same seed, same pixels:", first["augmented"].equal(again["augmented"]))
print("same pixels with another seed:", first["augmented"].equal(other["augmented"]))

rows = {"as recorded": first[camera], "augmented": first["augmented"], "in another run": again["augmented"]}
figure, axes = plt.subplots(3, 4, figsize=(8, 5), layout="constrained")
for row, (label, frames) in zip(axes, rows.items(), strict=True):
    for axis, frame in zip(row, frames, strict=True):
        axis.imshow(frame.permute(1, 2, 0).numpy())
        axis.axis("off")
    row[0].set_title(label, loc="left", fontsize=9)
figure.savefig("augmentation.png")
