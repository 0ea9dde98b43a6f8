"""Pipeline that carries out the schedule: it reads and decodes data, runs the DALI graph, and assembles batches.

The way of a frame, from the order to the training loop:

    order/order.py              which frame is next: a pure function of seed, epoch and position
    schedule/samples.py         the samples of each batch of this rank
    pipeline/planner.py         thread that plans each batch ahead of the training loop:
      Reading                     opens the episodes of the batch, and fetches encoded video of remote files
        cache/open_episodes.py      rows of the episode (lerobot/rows.py) and index of its video file (mp4/index.py)
        cache/video.py              blocks of the file (storage/)
      schedule/plan.py            plan of the batch; for each camera:
        schedule/frames.py          which frames are in memory, which GOPs to decode, what to keep, in which slots
      pipeline/gather.py          columns of the batch
    pipeline/decode_pool.py     threads that carry out the plan:
      decode/torchcodec_decoder.py  divides the frames into tasks, each of which is decoded from one clip
        mp4/clip.py                   packs the GOPs of the frames into a clip, a small MP4 in memory
        decode/torchcodec.py          decodes the clip on the CPU or on NVDEC, and compares the time of each frame
        decode/resize.py              resizes the frames
        cache/slots.py                puts them into their slots
      cache/frames_on_disk.py       reads frames that the frame cache on disk has, and adds decoded ones
    pipeline/batch.py           waits for the frames of the next batch, and gathers them from the slots
    pipeline/torch_batches.py   tensors on the CPU; or
    pipeline/dali_batches.py    DALI graph, for a GPU or a function of the user
    loader.py                   normalizes, counts the position, and returns the batch

`Layout` says which camera takes which decoder, and what follows from it. `BatchStream` owns the planner, the threads and the
slots from one position of the order on, and `BatchSource` replaces it, if a decoder fails or an epoch is left early.
"""
