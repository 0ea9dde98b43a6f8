"""A batch of windows: three frames of a camera, and the next 20 actions."""

import matplotlib.pyplot as plt

import dali_stream

dataset = dali_stream.Dataset("demo")
camera = "observation.images.top"
windows = {
    camera: [-1.0, -0.5, 0.0],  # seconds
    "action": [step / dataset.fps for step in range(20)],
}
with dali_stream.Loader(dataset, batch_size=3, delta_timestamps=windows, seed=33, device="cpu") as loader:
    batch = next(iter(loader))

for key in (camera, f"{camera}_is_pad", "action", "action_is_pad", "task"):
    value = batch[key]
    print(f"{key:28}", tuple(value.shape) if hasattr(value, "shape") else value[0])

figure, axes = plt.subplots(3, 4, figsize=(9, 5.5), layout="constrained")
for sample, row in enumerate(axes):
    for step, axis in enumerate(row[:3]):
        axis.imshow(batch[camera][sample, step].permute(1, 2, 0).numpy())
        outside = ", before the episode" if batch[f"{camera}_is_pad"][sample, step] else ""
        axis.set_title(f"{windows[camera][step]:+.1f} s{outside}", fontsize=8)
        axis.axis("off")
    row[3].plot(windows["action"], batch["action"][sample].numpy())
    after = [t for t, pad in zip(windows["action"], batch["action_is_pad"][sample], strict=True) if pad]
    if after:
        row[3].axvspan(after[0], windows["action"][-1], color="0.85")
    row[3].set_title("action" + (", grey after the episode" if after else ""), fontsize=8)
figure.savefig("window.png")
