"""A graph of your own: DALI decodes the video on the CPU, and its operators add edges and the change between frames."""

import matplotlib.pyplot as plt
from nvidia.dali import fn

import dali_stream

camera = "observation.images.top"


def graph(nodes: dict) -> dict:
    """Map the nodes of a batch to others: nodes[camera] has the layout FHWC, here with two frames."""
    now, before = nodes[camera][1], nodes[camera][0]
    edges = fn.laplacian(fn.gaussian_blur(now, sigma=0.8), window_size=3)
    return nodes | {"edges": edges, "change": now - before}


dataset = dali_stream.Dataset("demo", cameras=[camera])
windows = {camera: [-0.2, 0.0]}
options = {"decode": "dali", "device": "cpu", "delta_timestamps": windows}  # DALI decodes VP8, VP9 and MJPEG on a CPU
with dali_stream.Loader(dataset, batch_size=4, seed=2, dali_graph=graph, **options) as loader:
    batch = next(iter(loader))
    print("decoder:", loader.routes[camera].decoder)
for key in (camera, "edges", "change"):
    print(f"{key:24}", tuple(batch[key].shape), batch[key].dtype)

figure, axes = plt.subplots(3, 4, figsize=(8, 5), layout="constrained")
for sample in range(4):
    axes[0, sample].imshow(batch[camera][sample, 1].permute(1, 2, 0).numpy())
    axes[1, sample].imshow(batch["edges"][sample].abs().amax(0).numpy(), cmap="gray")
    axes[2, sample].imshow((0.5 + 0.5 * batch["change"][sample]).permute(1, 2, 0).clamp(0, 1).numpy())
for row, label in zip(axes, ("current frame", "edges", "change in 0.2 s"), strict=True):
    row[0].set_title(label, loc="left", fontsize=9)
    for axis in row:
        axis.axis("off")
figure.savefig("graph.png")
