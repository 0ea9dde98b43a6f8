"""Pipeline that carries out the schedule: it reads and decodes data, runs the DALI graph, and assembles batches.

The way of a frame of a Loader without DALI, as a tree of calls. Names in brackets are threads. All but the caller are in the
process of the Loader, unless `in_process=True`:

    loader.py                         [caller] next(iterator); at the end it normalizes, and counts the position
      pipeline/stream.py                BatchSource makes a BatchStream from a position on: a producer and a front end
      pipeline/torch_batches.py         makes tensors of the next finished batch (or pipeline/dali_batches.py with a DALI graph)
        pipeline/producer_process.py      requests it from the process of the Loader
    pipeline/producer_main.py         [batches] answers the request
      pipeline/producer.py              waits for the tasks of the batch, and substitutes samples that failed
        decode/decoder.py                 SlotWork.collect copies the frames of the batch
          cache/slots.py                    from their slots, divided by 255 for float32
      cache/shared_buffers.py           says where in shared memory the batch is
    pipeline/planner.py               [planner] plans batch after batch, ahead of the caller
      schedule/samples.py               samples of the batch, from order/orders.py, order/order.py and order/pool.py
      cache/open_episodes.py            opens their episodes: rows (lerobot/rows.py), index of the video (mp4/index.py)
        cache/frames_on_disk.py           which of their frames are on disk
      schedule/plan.py                  plan of the batch, for each camera by
        schedule/frames.py                which frames are in memory, which GOPs to decode, what to keep, in which slots
      cache/video.py                    remote files only: requests the blocks of video that the plan needs
      pipeline/tabular.py               columns of the batch
      pipeline/decode_pool.py           starts the decode tasks
    decode/torchcodec_decoder.py      [decode threads] a task has whole GOPs, which are decoded from one clip
      cache/frames_on_disk.py           reads what the disk has; of the rest, takes what no other process decodes
      mp4/clip.py                       reads the GOPs, from the file or from blocks in memory, and packs them into a clip
      decode/processes.py               with decode processes: sends the clip to one, which does the next three
        decode/resized.py                 clip in, frames out
          decode/torchcodec.py              decodes the clip on the CPU or on NVDEC, and compares the time of each frame
          decode/resize.py                  resizes the frames
      cache/slots.py                    puts them into their slots
      cache/frames_on_disk.py           adds them to the disk

Rows and indices leave memory when `cache/look_ahead.py` needs room. `cache/account.py`, which has their sizes, then chooses
those that no batch ahead needs and that were used least recently. `OpenEpisodes` drops them. It closes an episode without rows
in `schedule/episodes.py`, which holds the rows of open episodes, in `cache/video.py` and in `cache/frames_on_disk.py`.

`Layout` says which camera takes which decoder, and what follows from it. `BatchSource` replaces its `BatchStream` if a decoder
fails or an epoch is left early.
"""
