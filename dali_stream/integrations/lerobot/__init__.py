"""LeRobot's training script with a Loader in place of its DataLoader, and a Loader for a `LeRobotDataset`.

    dali-stream lerobot-train --dataset.repo_id=... --policy.type=act --loader.image_size=224x224

To do the same in Python:

    from lerobot.scripts import lerobot_train
    from dali_stream.integrations import lerobot

    lerobot.patch(image_size=(224, 224))
    lerobot_train.main()

LeRobot is imported only when a function needs it, so this package can be imported without LeRobot.
"""

from dali_stream.integrations.lerobot.loader import make_loader
from dali_stream.integrations.lerobot.resizing import add_resizing
from dali_stream.integrations.lerobot.script import patch

__all__ = ["add_resizing", "make_loader", "patch"]
