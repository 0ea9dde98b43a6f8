"""A mixture: two samples of one dataset for each sample of the other, throughout the epoch."""

import matplotlib.pyplot as plt
import numpy as np

import dali_stream

parts = {
    "first": dali_stream.Dataset("demo", episodes=[0, 1, 2]),
    "last": dali_stream.Dataset("demo", episodes=[3]),  # an example for a second dataset
}
mixture = dali_stream.Mixture(parts, weights={"first": 2, "last": 1})
print(mixture)
names = []
with dali_stream.Loader(mixture, batch_size=12, image_size=(120, 160), last_batch="partial") as loader:
    for batch in loader:
        names += batch["dataset"]

for name, share, passes in zip(parts, mixture.shares.targets, mixture.shares.passes, strict=True):
    frames = parts[name].num_frames
    print(f"{name}: {names.count(name)} samples of {frames} frames, {share:.0%} of the epoch, {passes:.2f} passes")

place = np.arange(1, len(names) + 1)
ours = np.cumsum([name == "first" for name in names]) - place * 2 / 3
drawn = np.cumsum(np.random.default_rng(0).random(len(names)) < 2 / 3) - place * 2 / 3
print(f"largest distance from the share: {np.abs(ours).max():.1f} samples, drawn with replacement: {np.abs(drawn).max():.1f}")

figure, axis = plt.subplots(figsize=(8, 3), layout="constrained")
axis.plot(place, drawn, color="0.6", label="drawn with replacement")
axis.plot(place, ours, label="dali_stream")
axis.set(xlabel="samples", ylabel="samples of `first` minus its share")
axis.legend()
figure.savefig("mixture.png")
