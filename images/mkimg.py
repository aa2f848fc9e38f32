#!/usr/bin/env python3
"""mkimg.py OUT.tar NAME:TAG ROOTFS ENTRYPOINT...: a one-layer image archive that `ctr images import` and `docker load` take.

The same folder always gives the same bytes: files in order of their names, all owned by root and of the year 1970.
"""
import hashlib
import io
import json
import platform
import sys
import tarfile

out, name, rootfs, *entrypoint = sys.argv[1:]


def reproducible(info):
    info.uid = info.gid = 0
    info.uname = info.gname = "root"
    info.mtime = 0
    return info


def as_json(value):
    return json.dumps(value, sort_keys=True).encode()


buffer = io.BytesIO()
with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
    tar.add(rootfs, arcname=".", filter=reproducible)
layer = buffer.getvalue()
layer_id = hashlib.sha256(layer).hexdigest()

config = as_json({
    "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()],
    "os": "linux",
    "config": {"Entrypoint": entrypoint, "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]},
    "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_id}"]},
})
config_name = hashlib.sha256(config).hexdigest() + ".json"
manifest = as_json([{"Config": config_name, "RepoTags": [name], "Layers": [f"{layer_id}/layer.tar"]}])

with tarfile.open(out, "w", format=tarfile.GNU_FORMAT) as tar:
    for path, data in ((config_name, config), (f"{layer_id}/layer.tar", layer), ("manifest.json", manifest)):
        info = tarfile.TarInfo(path)
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
