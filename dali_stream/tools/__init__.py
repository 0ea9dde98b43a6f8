"""Programs on top of the library: doctor, selftest, bench, reshard, transcode, index. Nothing else imports them."""
