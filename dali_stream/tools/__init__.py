"""Programs on top of the library: doctor, describe, selftest, bench, reshard, transcode, index. Nothing else imports them."""
