"""Is this machine, or this set of machines, fit to train? Run it before the training, in the same way.

    torchrun --standalone --nproc_per_node=8 tools/doctor.py
    torchrun --nnodes=2 ... tools/doctor.py --out /data/runs --disk 200
    python tools/doctor.py --json                                            one rank

    every rank    looks at itself: software, GPUs, limits, variables, interfaces, cores, disk  ──┐
    one per host  connects to every other host, compares clocks, copies between its GPUs        ├─ torchrun's store ─> rank 0
    every rank    makes a process group, checks and times three collectives by size            ──┘   judges and prints

Results travel through torchrun's store and not through the process group, since the group is what may be broken. Each
check runs in its own time limit; the copies between GPUs run in a process of their own, because a driver can promise
direct access that then hangs. On GPUs the collectives write NCCL's log to a file, which tools/nccl_log.py reads: so the
report says which path the data really took.

Exit code: 0 fit, 1 not fit (a check says `fail`). `slow` and `note` are worth reading but do not stop a training;
`unknown` means that this machine does not show it.
"""

import argparse
import contextlib
import fcntl
import glob
import io
import json
import os
import queue
import re
import resource
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

TOOLS = Path(__file__).resolve().parent
sys.path.insert(0, str(TOOLS.parent))

from tools import nccl_log  # noqa: E402

GIB, MIB = 2**30, 2**20
SIZES = {"cuda": (4096, MIB, 16 * MIB, 256 * MIB), "cpu": (4096, MIB, 16 * MIB)}  # bytes of each collective
SECONDS = {  # time limit of each check
    "software": 60, "gpus": 60, "nvidia-smi": 60, "limits": 10, "settings": 10, "network": 20, "machine": 30, "disk": 20,
    "facts": 120, "reach": 30, "copy": 30, "collectives": 120,
}  # fmt: skip


class Result(NamedTuple):
    check: str
    state: str  # ok, note, slow, fail, unknown
    found: str
    fix: str = ""


# ── measuring: what one rank sees of its machine ─────────────────────────────────────────────────────────────────────
def within(seconds, function, *arguments):
    """What `function` returns, a dict; {"error": …} if it raises or needs longer. It may hang for good, so it gets a
    thread that nobody waits for."""
    box = queue.SimpleQueue()

    def work():
        try:
            box.put(function(*arguments))
        except Exception as error:
            box.put({"error": f"{type(error).__name__}: {str(error).strip()[:300]}"})

    threading.Thread(target=work, daemon=True).start()
    try:
        return box.get(timeout=seconds)
    except queue.Empty:
        return {"error": f"no answer within {seconds:g} s", "hangs": True}


def output_of(*command):
    """Standard output of a program; nothing if it is not there or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    return done.stdout if done.returncode == 0 else ""


def text_of(path):
    with contextlib.suppress(OSError):
        return Path(path).read_text(errors="replace")
    return ""


def software():
    has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    waiting = [path for folder in libraries if folder for path in glob.glob(f"{folder}/libnccl.so*")]
    waiting += [path for path in re.split("[: ]", os.environ.get("LD_PRELOAD", "")) if "libnccl" in path]
    return {
        "Python": ".".join(map(str, sys.version_info[:3])),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "none",
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "none",
        "loaded": mapped_nccl(text_of("/proc/self/maps")),
        "waiting": sorted({os.path.realpath(path) for path in waiting}),
    }


def gpus(local_rank):
    count = torch.cuda.device_count()
    mine = torch.cuda.get_device_properties(local_rank) if local_rank < count else None
    return {
        "cuda": torch.cuda.is_available(),
        "hidden": os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"),  # on purpose
        "visible": count,
        "mine": str(getattr(mine, "uuid", local_rank)).removeprefix("GPU-") if mine else None,
    }


def nvidia_smi(local_rank):
    """What the driver's own program says about the host; one rank asks."""
    if local_rank:
        return {}
    table = ("nvidia-smi", "--format=csv,noheader,nounits")
    return {
        "listed": parse_gpus(output_of(*table, "--query-gpu=index,uuid,name,memory.total,memory.used,driver_version")),
        "programs": parse_programs(output_of(*table, "--query-compute-apps=gpu_uuid,pid,process_name,used_memory")),
        "topology": parse_topology(output_of("nvidia-smi", "topo", "-m")),
        "fabric": fabric_state(output_of("nvidia-smi", "-q")),
    }


def limits():
    shm = os.statvfs("/dev/shm")
    return {
        "shm": shm.f_blocks * shm.f_frsize,
        "shm_free": shm.f_bavail * shm.f_frsize,
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "container": in_container(text_of("/proc/1/cgroup"), os.path.exists, os.environ),
    }


def settings():
    """Variables that steer NCCL and its use by PyTorch, with the place each comes from."""
    files = ["/etc/nccl.conf", os.environ.get("NCCL_CONF_FILE") or os.path.expanduser("~/.nccl.conf")]
    found = {}
    for path in files:
        found |= {name: (value, path) for name, value in parse_conf(text_of(path)).items()}
    names = [name for name in os.environ if re.match("NCCL_|GLOO_|TORCH_NCCL_|TORCH_FR_|TORCH_GLOO_", name)]
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun sets this one itself
        names = [name for name in names if name != "TORCH_NCCL_ASYNC_ERROR_HANDLING"]
    return found | {name: (os.environ[name], "environment") for name in sorted(names)}


def network():
    host = socket.gethostname()
    try:
        resolved = sorted({info[4][0] for info in socket.getaddrinfo(host, None)})
    except OSError:
        resolved = []
    return {"host": host, "resolved": resolved, "interfaces": list_interfaces(), "rdma": list_rdma()}


def list_interfaces():
    """[name, address, up] of every interface with an IPv4 address, or else a global IPv6 one."""
    found = []
    six = parse_if_inet6(text_of("/proc/net/if_inet6"))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            address, up = six.get(name), False
            with contextlib.suppress(OSError):
                up = bool(struct.unpack("H", fcntl.ioctl(probe, 0x8913, request)[16:18])[0] & 1)  # SIOCGIFFLAGS, IFF_UP
                address = socket.inet_ntoa(fcntl.ioctl(probe, 0x8915, request)[20:24])  # SIOCGIFADDR
            if address:
                found.append([name, address, up])
    return found


def list_rdma():
    """[device/port, state, rate, link layer] of InfiniBand and RoCE ports."""
    ports = sorted(glob.glob("/sys/class/infiniband/*/ports/*"))
    return [
        [
            "/".join(port.split("/")[4:7:2]),
            *(text_of(f"{port}/{name}").strip() for name in ("state", "rate", "link_layer")),
        ]
        for port in ports
    ]


def machine(local_world_size):
    quota = text_of("/sys/fs/cgroup/cpu.max").split()
    cores = len(os.sched_getaffinity(0))
    return {
        "cores": min(cores, int(quota[0]) / int(quota[1])) if quota and quota[0] != "max" else cores,
        "threads": torch.get_num_threads(),
        "local_world_size": local_world_size,
        "memory": parse_memory(text_of("/proc/meminfo"), text_of("/sys/fs/cgroup/memory.max")),
        "kernel": text_of("/proc/cmdline").strip(),
        "iommu": len(glob.glob("/sys/class/iommu/*")),
        "acs": acs_bridges(output_of("lspci", "-vvv")),
        "peermem": any(
            line.startswith(("nvidia_peermem", "nv_peer_mem")) for line in text_of("/proc/modules").splitlines()
        ),
        "open_driver": "Open Kernel Module" in text_of("/proc/driver/nvidia/version"),
    }


def disk(out):
    """Free space where --out will be: its nearest folder that exists."""
    folder = Path(out).absolute()
    while not folder.exists():
        folder = folder.parent
    return {"folder": str(folder), "free": shutil.disk_usage(folder).free, "writable": os.access(folder, os.W_OK)}


# ── reading what programs and the kernel print ───────────────────────────────────────────────────────────────────────
def mapped_nccl(maps):
    """Files of libnccl in /proc/self/maps."""
    return sorted({line.split(maxsplit=5)[5] for line in maps.splitlines() if "/libnccl.so" in line})


def parse_gpus(text):
    """Rows of `nvidia-smi --query-gpu`; memory in MiB."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.count(",") == 5]
    names = ("index", "uuid", "name", "total", "used", "driver")
    found = [dict(zip(names, row, strict=True)) for row in rows]
    return [gpu | {"total": number(gpu["total"]), "used": number(gpu["used"])} for gpu in found]


def parse_programs(text):
    """Rows of `nvidia-smi --query-compute-apps`: [uuid, pid, name, MiB]."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.count(",") >= 3]
    return [[row[0], row[1], ",".join(row[2:-1]), number(row[-1])] for row in rows]


def number(text):
    return int(text) if text.isdigit() else 0  # "[N/A]" on some machines


def parse_topology(text):
    """The matrix of `nvidia-smi topo -m` -> {"0 1": "NV18"}; keys are indices as nvidia-smi counts."""
    text = re.sub(r"\x1b\[[\d;]*m", "", text)
    columns, pairs = [], {}
    for line in text.splitlines():
        cells = line.split()
        if not columns and cells and all(re.fullmatch(r"GPU\d+", cell) for cell in cells[:1]):
            columns = [cell for cell in cells if re.fullmatch(r"(?:GPU|NIC)\d+", cell)]
        elif cells and re.fullmatch(r"GPU\d+", cells[0]):
            for column, kind in zip(columns, cells[1:], strict=False):
                if column.startswith("GPU") and kind != "X":
                    pairs[f"{cells[0][3:]} {column[3:]}"] = kind
    return pairs


def fabric_state(text):
    """NVSwitch machines: the state in `nvidia-smi -q`; the worst of all GPUs."""
    states = re.findall(r"^\s+Fabric\s*\n\s+State\s+: (.*)$", text, re.M)
    return next((state for state in states if state not in ("Completed", "N/A")), "Completed" if states else "")


def parse_conf(text):
    pairs = (line.split("#")[0].split("=", 1) for line in text.splitlines() if "=" in line.split("#")[0])
    return {name.strip(): value.strip() for name, value in pairs}


def parse_if_inet6(text):
    """Global addresses of /proc/net/if_inet6 by interface."""
    rows = [line.split() for line in text.splitlines()]
    return {row[5]: ":".join(re.findall("....", row[0])) for row in rows if len(row) == 6 and row[3] == "00"}


def parse_memory(meminfo, cgroup):
    """Bytes this process may count on: what is available, or less where a cgroup says so."""
    available = re.search(r"MemAvailable:\s+(\d+) kB", meminfo)
    limits = [int(available[1]) * 1024] if available else []
    limits += [int(cgroup)] if cgroup.strip().isdigit() else []
    return min(limits, default=0)


def acs_bridges(text):
    """PCI bridges whose access control redirects traffic between devices to the root, from `lspci -vvv` (root only)."""
    found = []
    for block in re.split(r"\n(?=\S)", text):
        if "PCI bridge" in block.split("\n")[0] and re.search(r"ACSCtl:.*(?:ReqRedir|CmpltRedir)\+", block):
            found.append(block.split(" ")[0])
    return found


def in_container(cgroup, exists, environment):
    if "KUBERNETES_SERVICE_HOST" in environment:
        return "kubernetes"
    marks = ("/.dockerenv", "/run/.containerenv")
    return "container" if any(map(exists, marks)) or re.search("docker|kubepods|containerd|lxc", cgroup) else ""


def nccl_interfaces(names, setting):
    """The interfaces NCCL takes from `names`: those that NCCL_SOCKET_IFNAME (`setting`) leaves, else by kind."""
    if setting:
        out, exact = setting[0] == "^", setting.lstrip("^")[:1] == "="
        wanted = [part for part in setting.lstrip("^=").split(",") if part]
        return [n for n in names if out != any(n == part if exact else n.startswith(part) for part in wanted)]
    kinds = (
        [n for n in names if n.startswith("ib")],
        [n for n in names if not n.startswith(("docker", "lo"))],
        [n for n in names if n.startswith("docker")],
        [n for n in names if n.startswith("lo")],
    )
    return next((kind for kind in kinds if kind), [])


def chosen_interfaces(network, settings, gpu):
    """[(name, address)] that NCCL, or on CPUs gloo, will use on a host. Without its variable gloo takes the address that
    the host's own name has, and loopback if it has none here."""
    up = {name: address for name, address, is_up in network.get("interfaces", ()) if is_up}
    setting = settings.get(interface_variable(gpu), ("",))[0]
    if gpu:
        names = nccl_interfaces(list(up), setting)
    elif setting:
        names = [name for name in setting.split(",") if name in up]
    else:
        resolved = network.get("resolved", ())
        names = [name for name in up if up[name] in resolved] or [name for name in up if name == "lo"]
    return [(name, up[name]) for name in names]


def interface_variable(gpu):
    return "NCCL_SOCKET_IFNAME" if gpu else "GLOO_SOCKET_IFNAME"


# ── judging: facts -> results ────────────────────────────────────────────────────────────────────────────────────────
# `facts` is a list with one dict per rank; each judge gets the part its measurement made, of the ranks where it worked.
def differing(values):
    """{rank: value} -> "a on ranks 0-3, b on rank 4"."""
    groups = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on {nccl_log.in_words(ranks)}" for value, ranks in groups.items())


def judge_software(parts):
    results, versions = [], {}
    for name in ("torch", "CUDA", "NCCL", "Python"):
        values = {rank: part[name] for rank, part in parts.items()}
        versions[name] = next(iter(values.values()))
        if len(set(values.values())) > 1:
            serious = "fail" if name in ("torch", "NCCL") else "note"
            fix = "install the same wheels or run the same container image on every host"
            results.append(Result("software", serious, f"{name} {differing(values)}", fix))
    if not results:
        same = ", ".join(f"{name} {version}" for name, version in versions.items() if version != "none")
        results.append(Result("software", "ok", f"{same}, the same on all ranks"))
    loaded = {rank: " and ".join(part["loaded"]) for rank, part in parts.items() if len(part["loaded"]) > 1}
    others = {path for part in parts.values() for path in part["waiting"] if path not in part["loaded"]}
    if loaded:
        fix = "keep the one of torch's wheel; take the other out of LD_PRELOAD and LD_LIBRARY_PATH"
        results.append(Result("libnccl", "fail", f"two copies are loaded: {differing(loaded)}", fix))
    elif others:
        fix = "take it out of LD_LIBRARY_PATH, unless it is there on purpose and the same on every host"
        results.append(Result("libnccl", "note", f"another copy waits at {', '.join(sorted(others))}", fix))
    return results


def judge_gpus(parts, facts):
    if not any(part["cuda"] for part in parts.values()):
        listed = any(part["listed"] and not part["hidden"] for part in parts.values())
        fix = "install a CUDA build of torch that this driver can run" if listed else ""
        found = "nvidia-smi lists GPUs, but torch sees none" if listed else "none; training runs on CPUs over gloo"
        return [Result("gpus", "fail" if listed else "note", found, fix)]
    results, owners = [], {}
    for rank, part in parts.items():
        owners.setdefault((facts[rank]["node"], part["mine"]), []).append(rank)
    lacking = [rank for rank, part in parts.items() if part["mine"] is None]
    if lacking:
        n = min(part["visible"] for part in parts.values())
        fix = f"--nproc_per_node={n}, or show more in CUDA_VISIBLE_DEVICES"
        results.append(Result("gpus", "fail", f"{n} GPUs visible, none left for {nccl_log.in_words(lacking)}", fix))
    shared = [ranks for (_, mine), ranks in owners.items() if mine is not None and len(ranks) > 1]
    if shared:
        fix = "let every rank see all GPUs of the host and take the one of its LOCAL_RANK"
        said = "; ".join(map(nccl_log.in_words, shared))
        results.append(Result("gpus", "fail", f"ranks share a GPU: {said}", fix))
    names = {rank: f"{gpu['name']}, {gpu['total'] / 1024:.0f} GiB" for rank, gpu in used_gpus(parts).items()}
    drivers = {rank: gpu["driver"] for rank, gpu in used_gpus(parts).items()}
    if len(set(names.values())) > 1:
        results.append(Result("gpus", "slow", differing(names), "the slowest GPU sets the pace; group equal ones"))
    if len(set(drivers.values())) > 1:
        results.append(Result("driver", "note", differing(drivers), "install one driver version on every host"))
    if not results:
        kinds = ", ".join(sorted(set(names.values()))) or "not described by nvidia-smi"
        found = f"one for each rank ({kinds}), driver {', '.join(sorted(set(drivers.values()))) or 'unknown'}"
        results.append(Result("gpus", "ok", found))
    return results + judge_company(parts) + judge_fabric(parts)


def used_gpus(parts):
    """rank -> the row of nvidia-smi for the GPU it will use"""
    found = {}
    for rank, part in parts.items():
        for gpu in part["listed"]:
            if gpu["uuid"].removeprefix("GPU-") == part["mine"]:
                found[rank] = gpu
    return found


def judge_company(parts):
    results = []
    for rank, gpu in used_gpus(parts).items():
        share = gpu["used"] / gpu["total"] if gpu["total"] else 0
        there = [
            f"{name} (pid {pid}, {mib} MiB)" for uuid, pid, name, mib in parts[rank]["programs"] if uuid == gpu["uuid"]
        ]
        if there or share > 0.1:
            found = f"the GPU of rank {rank} has {gpu['used']} MiB in use: {', '.join(there) or 'by a process not shown here'}"
            fix = "end those programs, or choose other GPUs with CUDA_VISIBLE_DEVICES"
            results.append(Result("others on the GPU", "fail" if share > 0.5 else "slow", found, fix))
    return results


def judge_fabric(parts):
    bad = {rank: part["fabric"] for rank, part in parts.items() if part["fabric"] not in ("", "Completed", "N/A")}
    fix = "start nvidia-fabricmanager in the driver's version, then reset the GPUs; stop-gap NCCL_NVLS_ENABLE=0"
    return [Result("NVSwitch fabric", "fail", differing(bad), fix)] if bad else []


def judge_limits(parts, gpu, rdma, ranks_per_node):
    first = min(parts.values(), key=lambda part: part["shm_free"])
    container = next((part["container"] for part in parts.values() if part["container"]), "")
    need = max(64 * MIB, ranks_per_node * (128 if gpu else 32) * MIB)
    docker = "docker run --gpus all --ipc=host --ulimit memlock=-1 --ulimit stack=67108864"
    shm_fix = (
        f"--shm-size={max(1, -(-need // GIB))}g or --ipc=host; Kubernetes: an emptyDir with medium Memory on /dev/shm"
    )
    found = f"{size(first['shm_free'])} free of {size(first['shm'])}; {ranks_per_node} ranks want about {size(need)}"
    results = [
        Result("/dev/shm", "ok", found) if first["shm_free"] >= need else Result("/dev/shm", "fail", found, shm_fix)
    ]
    lock = min(part["memlock"] % 2**64 for part in parts.values())  # -1 is unlimited
    if rdma and lock < GIB:
        fix = "ulimit -l unlimited in the job (limits.conf, LimitMEMLOCK of the daemon, docker --ulimit memlock=-1)"
        results.append(
            Result("ulimit -l", "fail", f"{size(lock)} may be locked; network cards need their buffers locked", fix)
        )
    else:
        found = "unlimited" if lock > 2**62 else f"{size(lock)}; enough without RDMA cards"
        results.append(Result("ulimit -l", "ok", found))
    files = min(part["nofile"] % 2**64 for part in parts.values())
    state = "fail" if files < 1024 else "note" if files < 4096 else "ok"
    fix = "ulimit -n 65536: sockets of all ranks and files of all readers count" if state != "ok" else ""
    results.append(Result("ulimit -n", state, f"{min(files, 2**62)} open files", fix))
    if container:
        fix = docker if container == "container" and gpu else "" if container == "container" else shm_fix
        results.append(Result("container", "note", f"runs in a {container}: limits and /dev/shm are its own", fix))
    return results


def size(amount):
    unit = next(n for n in (4, 3, 2, 1, 0) if amount >= 1024**n or n == 0)
    return f"{amount / 1024**unit:.{1 if unit else 0}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


VARIABLES = {  # name -> what it does; those with a leading "!" cost speed when set
    "NCCL_DEBUG": "how much NCCL prints",
    "NCCL_DEBUG_FILE": "where NCCL prints, line by line",
    "NCCL_DEBUG_SUBSYS": "which topics NCCL prints",
    "NCCL_SOCKET_IFNAME": "interfaces for bootstrap and TCP",
    "NCCL_IB_HCA": "RDMA cards to use",
    "NCCL_IB_GID_INDEX": "address of a RoCE card; leave it unset from NCCL 2.21 on",
    "NCCL_IB_TIMEOUT": "how long an RDMA card repeats before it gives up",
    "NCCL_IB_DISABLE": "!no RDMA between hosts, TCP instead",
    "NCCL_NET": "which network plugin",
    "NCCL_NET_GDR_LEVEL": "how far a GPU may be from its card for GPUDirect",
    "NCCL_P2P_DISABLE": "!GPUs of a host exchange through host memory",
    "NCCL_P2P_LEVEL": "how far apart GPUs may be for direct access",
    "NCCL_SHM_DISABLE": "!no shared memory within a host, the network instead",
    "NCCL_CUMEM_ENABLE": "how NCCL allocates GPU memory",
    "NCCL_CUMEM_HOST_ENABLE": "how NCCL allocates host memory; must be equal on all ranks",
    "NCCL_NVLS_ENABLE": "sums inside the NVSwitch; 0 switches it off",
    "NCCL_ALGO": "!forces an algorithm NCCL would choose by size",
    "NCCL_PROTO": "!forces a protocol NCCL would choose by size",
    "NCCL_BUFFSIZE": "bytes of a channel's buffer",
    "NCCL_MIN_NCHANNELS": "at least so many channels",
    "NCCL_MAX_NCHANNELS": "at most so many channels",
    "NCCL_NTHREADS": "threads of a channel",
    "NCCL_LAUNCH_MODE": "how kernels of several GPUs are launched",
    "NCCL_HOSTID": "what counts as one host",
    "NCCL_IGNORE_NET_MISMATCH": "!goes on although hosts see different numbers of cards, and may hang",
    "GLOO_SOCKET_IFNAME": "interface of gloo",
    "TORCH_NCCL_BLOCKING_WAIT": "!wait() blocks the host at every collective",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "what a failed collective does to the process",
    "TORCH_NCCL_DESYNC_DEBUG": "!the watchdog compares ranks; costs time at every collective",
    "TORCH_FR_BUFFER_SIZE": "entries of the flight recorder",
    "TORCH_FR_DUMP_TEMP_FILE": "where the flight recorder is written",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "entries of the flight recorder, old name",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "where the flight recorder is written, old name",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "write the flight recorder at a time-out",
}
PER_HOST = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_DEBUG", "NCCL_HOSTID", "TORCH_")


def judge_settings(parts):
    """One line for each variable that is set anywhere."""
    results = []
    for name in sorted({name for part in parts.values() for name in part}):
        values = {rank: " from ".join(part[name]) if name in part else "unset" for rank, part in parts.items()}
        what = VARIABLES.get(name, "not known to this program")
        found = differing(values) if len(set(values.values())) > 1 else next(iter(values.values()))
        found = f"{name} = {found}: {what.lstrip('!')}"
        costs = what[0] == "!" and any(part[name][0] not in ("0", "") for part in parts.values() if name in part)
        if len(set(values.values())) > 1 and not name.startswith(PER_HOST):
            results.append(Result("variable", "fail", found, f"the same {name} on every rank"))
        elif costs:
            results.append(Result("variable", "slow", found, f"unset {name}, unless you are testing"))
        else:
            results.append(Result("variable", "note", found))
    return results


def judge_network(parts, settings, nodes, gpu):
    """Which interface each host will use, and whether its own name leads anywhere."""
    results, used, name = [], {}, interface_variable(gpu)
    several = len({parts[rank]["host"] for rank in nodes.values()}) > 1
    for rank in nodes.values():
        part = parts[rank]
        chosen = used[part["host"]] = chosen_interfaces(part, settings.get(rank, {}), gpu)
        there = ", ".join(interface for interface, *_ in part["interfaces"])
        if not chosen:
            found = f"{part['host']}: {name}={settings[rank].get(name, ('',))[0]} leaves none"
            results.append(Result("interface", "fail", found, f"unset {name}, or name one of {there}"))
        elif several and (chosen[0][0] == "lo" or nccl_log.VIRTUAL.match(chosen[0][0])):
            fix = f"{name} = the interface that reaches the other hosts (of {there})"
            results.append(Result("interface", "fail", f"{part['host']} would use {' '.join(chosen[0])}", fix))
        if several and any(address.startswith("127.") or address == "::1" for address in part["resolved"]):
            fix = f"in /etc/hosts give {part['host']} its address on the network instead of 127.x"
            results.append(Result("hostname", "fail", f"{part['host']} resolves to {', '.join(part['resolved'])}", fix))
        elif not part["resolved"]:
            fix = f"add {part['host']} to /etc/hosts or DNS"
            results.append(Result("hostname", "fail" if several else "note", f"{part['host']} has no address", fix))
    if not any(one.check == "interface" for one in results):
        found = "; ".join(f"{host}: {', '.join(' '.join(pair) for pair in pairs[:3])}" for host, pairs in used.items())
        results.insert(0, Result("interface", "ok", found))
    ports = {parts[rank]["host"]: parts[rank]["rdma"] for rank in nodes.values() if parts[rank]["rdma"]}
    for host, rows in ports.items():
        down = [port for port, state, *_ in rows if "ACTIVE" not in state]
        found = f"{host}: " + ", ".join(
            f"{port} {rate} {layer}" for port, state, rate, layer in rows if port not in down
        )
        found += f"; not active: {', '.join(down)}" if down else ""
        results.append(
            Result("RDMA", "note" if down else "ok", found, "check cable and switch (ibstat)" if down else "")
        )
    if len({len(rows) for rows in ports.values()}) > 1 or 0 < len(ports) < len(nodes):
        fix = "make the same cards visible on every host (NCCL_IB_HCA, /dev/infiniband in the container)"
        results.append(Result("RDMA", "fail" if gpu else "note", "hosts have different numbers of RDMA ports", fix))
    return results


def judge_machine(parts, nodes, gpu, rdma):
    results = []
    for rank in nodes.values():
        part, n = parts[rank], parts[rank]["local_world_size"]
        spare = part["cores"] / n - 1
        found = f"{part['cores']:g} for {n} ranks, {part['threads']} threads each, {size(part['memory'])} of memory to be had"
        if spare < 0:
            results.append(
                Result("cores", "slow", found, f"fewer ranks: --nproc_per_node={max(1, int(part['cores']))}")
            )
        else:
            fix = "" if spare >= 1 else "readers share the core of their rank: --workers 0 or 1, or data encoded ahead"
            results.append(Result("cores", "ok" if spare >= 1 else "note", found, fix))
        if gpu and part["acs"]:
            fix = (
                "setpci or BIOS: switch ACS off on these bridges, else copies between GPUs cross the root and may hang"
            )
            results.append(
                Result("ACS", "note", f"on at {len(part['acs'])} bridges ({', '.join(part['acs'][:4])} …)", fix)
            )
        if (
            gpu
            and (part["iommu"] or re.search(r"(?:intel|amd)_iommu=on", part["kernel"]))
            and "iommu=pt" not in part["kernel"]
        ):
            fix = "on bare metal: iommu=pt on the kernel's command line, or off in the BIOS; matters if the copies below fail"
            results.append(Result("IOMMU", "note", "translates addresses (no iommu=pt)", fix))
        if gpu and rdma and not (part["peermem"] or part["open_driver"]):
            fix = "modprobe nvidia-peermem on every node, or the open kernel driver (DMA-BUF)"
            results.append(
                Result("GPUDirect", "slow", "nvidia_peermem is not loaded and the driver is not the open one", fix)
            )
    return results


def judge_disk(parts, wanted):
    worst = min(parts.values(), key=lambda part: part["free"])
    found = f"{worst['folder']}: {size(worst['free'])} free"
    if not all(part["writable"] for part in parts.values()):
        return [Result("disk", "fail", f"{worst['folder']} is not writable", "another --out, or change its owner")]
    if worst["free"] < wanted * GIB:
        return [
            Result(
                "disk", "fail", f"{found}, {wanted:g} GiB wanted", "another --out, fewer --keep, or a smaller --disk"
            )
        ]
    return [Result("disk", "ok", found)]


def judge_reach(reports, names):
    """reports: node -> {other node: {"skew", "rtt"} or {"error"}}"""
    results, skews = [], []
    for node, report in reports.items():
        for other, answer in report.items():
            if "error" in answer:
                found = f"{names[node]} does not reach {names[other]} at {answer['address']}: {answer['error']}"
                fix = "open all TCP ports between the hosts, or NCCL_SOCKET_IFNAME/GLOO_SOCKET_IFNAME = the right interface"
                results.append(Result("reach", "fail", found, fix))
            elif abs(answer["skew"]) > 1 + answer["rtt"]:
                skews.append(f"{names[other]} is {answer['skew']:+.1f} s from {names[node]}")
    if not results:
        n = len(reports)
        found = (
            f"{n} hosts, each to each"
            if n > 1
            else f"one host, at its own address {next(iter(reports.values()))['0']['address']}"
        )
        results.append(Result("reach", "ok", found))
    if skews:
        fix = "start chrony or ntpd; time stamps of logs cannot be compared"
        results.append(Result("clock", "note", "; ".join(skews[:4]), fix))
    elif len(reports) > 1:
        results.append(Result("clock", "ok", "within a second on all hosts"))
    return results


def judge_copies(copies, host):
    """copies: [{"from", "to", "peer", "right", "gb_per_s"} or {"from", "to", "error"}]"""
    bad = [c for c in copies if "error" in c or not c["right"]]
    if bad:
        said = "; ".join(f"{c['from']} to {c['to']} {c.get('error', 'arrives changed')}" for c in bad[:6])
        fix = "NCCL_P2P_DISABLE=1 for now; then ACS and IOMMU off (BIOS, setpci, iommu=pt) and a newer driver"
        return [Result("copies", "fail", f"{host}: GPU {said}", fix)]
    speeds = [c["gb_per_s"] for c in copies]
    direct = sum(c["peer"] for c in copies)
    found = f"{host}: {len(copies)} pairs right, {direct} of them direct, {min(speeds):.0f} to {max(speeds):.0f} GB/s"
    if min(speeds) < 0.4 * max(speeds):
        slow = [f"{c['from']} to {c['to']}" for c in copies if c["gb_per_s"] < 0.4 * max(speeds)]
        fix = "see `nvidia-smi topo -m`: these GPUs are farther apart, or a link is down (nvidia-smi nvlink -s)"
        return [Result("copies", "note", f"{found}; slowest {', '.join(slow[:4])}", fix)]
    return [Result("copies", "ok", found)]


def bus_bandwidth(operation, amount, seconds, ranks):
    """GB/s that each link carries, the same for any number of ranks (nccl-tests' bus bandwidth).

    amount: bytes of the tensor that is reduced; of the gathered result; of one message
    """
    factor = {"all-reduce": 2 * (ranks - 1) / ranks, "all-gather": (ranks - 1) / ranks, "send/recv": 1.0}[operation]
    return amount * factor / seconds / 1e9


def expected_bandwidth(transport, topology, rdma_gbit):
    """GB/s of bus bandwidth that a link should give at large sizes, on the low side; None where there is no telling."""
    if transport.startswith("P2P"):
        if match := re.fullmatch(r"NV(\d+)", topology or ""):
            return 12.0 * int(match[1])  # of 25 GB/s in each direction of an NVLink, since Volta
        return {"PIX": 18.0, "PXB": 18.0, "PHB": 12.0, "NODE": 10.0, "SYS": 8.0}.get(topology or "")
    if transport.startswith("SHM"):
        return 5.0
    if transport.startswith("NET/IB") and rdma_gbit:
        return rdma_gbit / 8 * (0.8 if "GDRDMA" in transport else 0.4)
    return None


def judge_bandwidth(rows, transport, expected):
    """rows: [{"operation", "bytes", "gb_per_s"}], slowest rank of each"""
    if not rows:
        return []
    largest = max(row["bytes"] for row in rows)
    said = ", ".join(f"{row['operation']} {row['gb_per_s']:.2f}" for row in rows if row["bytes"] == largest)
    found = f"{said} GB/s at {size(largest)}" + f" over {transport}" * bool(transport)
    worst = min(row["gb_per_s"] for row in rows if row["bytes"] == largest)
    if expected and worst < expected / 2:
        fix = "nvidia-smi topo -m and nvlink -s, other jobs on the GPUs or the network; then nccl-tests between pairs"
        return [Result("bandwidth", "slow", f"{found}; about {expected:.0f} expected", fix)]
    return [Result("bandwidth", "ok", found + (f"; about {expected:.0f} expected" if expected else ""))]


def judge_collectives(reports, transport, expected):
    failures = {rank: report["error"] for rank, report in reports.items() if "error" in report}
    if failures:
        fix = "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names an interface of this host; on GPUs one try with NCCL_P2P_DISABLE=1"
        return [Result("collectives", "fail", differing(failures), fix)], []
    rows = []
    for i, row in enumerate(reports[0]["rows"]):
        seconds = max(report["rows"][i]["seconds"] for report in reports.values())
        speed = bus_bandwidth(row["operation"], row["bytes"], seconds, len(reports))
        rows.append({"operation": row["operation"], "bytes": row["bytes"], "seconds": seconds, "gb_per_s": speed})
    wrong = sorted({row["operation"] for report in reports.values() for row in report["rows"] if not row["right"]})
    if wrong:
        fix = "the copies between GPUs are wrong: NCCL_P2P_DISABLE=1 for now, then ACS, IOMMU, driver"
        return [Result("collectives", "fail", f"{', '.join(wrong)} gave a wrong result", fix)], rows
    found = f"{reports[0]['backend']}: all-reduce, all-gather and send/recv give what they should"
    if len(reports) == 1:
        return [Result("collectives", "ok", f"{reports[0]['backend']}, one rank: nothing to exchange")], []
    return [Result("collectives", "ok", found), *judge_bandwidth(rows, transport, expected)], rows


# ── between the ranks ────────────────────────────────────────────────────────────────────────────────────────────────
def find_store(rank, world_size, seconds):
    """A connection to torchrun's store. A second one serves the group, because one that waits lets nobody else speak."""
    if world_size == 1:
        return dist.HashStore(), dist.HashStore()
    limit = timedelta(seconds=seconds)
    first = next(dist.rendezvous("env://", timeout=limit))[0]  # comm: store, connects to torchrun's
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return first, dist.TCPStore(*address, is_master=False, timeout=limit)  # comm: store, a second connection


def post(store, key, value):
    store.set(f"doctor/{key}", json.dumps(value))  # comm: store, my part


def collect(store, keys, seconds):
    """{key: value} of those that arrive in time."""
    end, keys, found = time.monotonic() + seconds, list(keys), {}
    while keys and time.monotonic() < end:
        for key in [key for key in keys if store.check([f"doctor/{key}"])]:  # comm: store, poll
            found[key] = json.loads(store.get(f"doctor/{key}"))  # comm: store, another rank's part
            keys.remove(key)
        time.sleep(0.02)
    return found


def answer(listener, node):
    """Who I am and what time it is, to everyone who asks."""
    while True:
        connection, _ = listener.accept()
        with contextlib.suppress(OSError), connection:
            connection.recv(1)
            connection.sendall(f"{node} {time.time():.6f}\n".encode())


def reach(store, node, nodes, address, seconds):
    """Connect to the listener of every host, this one's too, on a port of the kernel's choice as NCCL and gloo do."""
    listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    threading.Thread(target=answer, args=(listener, node), daemon=True).start()
    post(store, f"listens/{node}", listener.getsockname()[:2])
    found = {}
    for key, where in collect(store, [f"listens/{other}" for other in nodes], seconds / 2).items():
        started = time.time()
        try:
            with socket.create_connection(where, timeout=5) as connection:  # comm: TCP, one byte to every host
                connection.sendall(b"?")
                who, remote = connection.makefile().readline().split()
            rtt = time.time() - started
            said = {"skew": float(remote) - started - rtt / 2, "rtt": rtt}
            if who != key.removeprefix("listens/"):
                said = {"error": "another host answers there"}
        except (OSError, ValueError) as error:
            said = {"error": str(error) or type(error).__name__}
        found[key.removeprefix("listens/")] = said | {"address": where[0]}
    silent = {str(other): {"error": "it did not listen", "address": "?"} for other in nodes}
    return silent | found


def copy_pairs(pairs, amount=64 * MIB):
    """In a process of its own: copy between GPUs, check every byte, print a line before and after each pair."""
    expected = torch.arange(amount // 4, dtype=torch.int32)
    for a, b in pairs:
        print(json.dumps({"from": a, "to": b, "begins": True}), flush=True)
        source = expected.to(f"cuda:{a}")
        target = torch.zeros_like(source, device=f"cuda:{b}")
        for count in (1, 10):
            torch.cuda.synchronize(a), torch.cuda.synchronize(b)
            started = time.perf_counter()
            for _ in range(count):
                target.copy_(source)
            torch.cuda.synchronize(a), torch.cuda.synchronize(b)
            seconds = (time.perf_counter() - started) / count
        right = torch.equal(target.cpu(), expected)
        peer = torch.cuda.can_device_access_peer(a, b)
        row = {"from": a, "to": b, "peer": peer, "right": right, "gb_per_s": amount / seconds / 1e9}
        print(json.dumps(row), flush=True)


def pass_on(stream, lines):
    for line in stream:
        lines.put(line)
    lines.put("")  # the end


def watch_copies(pairs, seconds, command):
    """Run `command` over the pairs; one that stays silent is killed and the pairs after it get a new process."""
    pairs, found = list(pairs), []
    while pairs and sum("error" in row for row in found) < 3:  # three that hang are proof enough
        names = ",".join(f"{a}:{b}" for a, b in pairs)
        child = subprocess.Popen([*command, names], stdout=subprocess.PIPE, text=True, start_new_session=True)
        lines = queue.SimpleQueue()
        threading.Thread(target=pass_on, args=(child.stdout, lines), daemon=True).start()
        error = None
        while pairs and error is None:
            try:
                line = lines.get(timeout=seconds)
            except queue.Empty:
                error = f"no answer within {seconds:g} s"
                break
            if not line:
                error = f"the copying process ended with code {child.wait()}"
            elif line.startswith("{") and "begins" not in (row := json.loads(line)):
                found.append(row)
                pairs.remove((row["from"], row["to"]))
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in the driver cannot even be killed
            child.wait(5)
        if error:
            a, b = pairs.pop(0)
            found.append({"from": a, "to": b, "error": error})
    return {"copies": found}


def collectives(store, rank, world_size, device, seconds, folder):
    """Check and time three collectives by size, on the group that a training would make."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(device)
        if "NCCL_DEBUG" not in os.environ:
            os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{folder}/nccl.%h.%p.log"}
    dist.init_process_group(  # comm: store, addresses of all ranks
        backend,
        store=dist.PrefixStore("doctor/group", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=4 * seconds),  # our own limit comes first
        device_id=device if backend == "nccl" else None,
    )
    rows = [row for amount in SIZES[device.type] for row in try_size(rank, world_size, device, amount // 4)]
    dist.destroy_process_group()  # comm: closes the connections
    logs = "".join(text_of(path) for path in glob.glob(f"{folder}/nccl.*.{os.getpid()}.log"))
    return {"backend": backend, "rows": rows, "log": logs[:MIB]}


def try_size(rank, world_size, device, n):
    """Three collectives of about n float32: each is timed, and its result is checked."""
    n -= n % world_size
    whole, part = torch.empty(n, device=device), torch.full((n // world_size,), float(rank), device=device)
    message, inbox = torch.full((n,), float(rank), device=device), torch.empty(n, device=device)
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before torch 2.13

    def all_reduce():
        whole.fill_(rank + 1.0)
        dist.all_reduce(whole)  # comm: all-reduce, each size, 12 times

    def all_gather():
        gather(whole, part)  # comm: all-gather, each size, 12 times

    def send_recv():
        ends = [dist.P2POp(dist.isend, message, after), dist.P2POp(dist.irecv, inbox, before)]
        for work in dist.batch_isend_irecv(ends):  # comm: send to the next rank, each size, 12 times
            work.wait()

    def row(operation, run, result, wanted):
        seconds = timed(run, device)
        return {"operation": operation, "bytes": n * 4, "seconds": seconds, "right": bool((result == wanted).all())}

    ranks = torch.arange(world_size, device=device).repeat_interleave(n // world_size)
    rows = [row("all-reduce", all_reduce, whole, world_size * (world_size + 1) / 2)]
    rows += [row("all-gather", all_gather, whole, ranks)]
    return rows + ([row("send/recv", send_recv, inbox, before)] if world_size > 1 else [])


def timed(run, device, warm=2, count=10):
    """Seconds of one run: the first ones make connections and are not counted."""
    for n in (warm, count):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        for _ in range(n):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return (time.perf_counter() - started) / count


def read_logs(reports):
    """NCCL's own lines of all ranks -> the transport of the slowest link, and what nccl_log finds in them."""
    log = nccl_log.Log()
    for rank, report in reports.items():
        if report.get("log"):
            nccl_log.read(log, io.BytesIO(report["log"].encode()), f"rank{rank}")
    if not log.recognised:
        return "", []
    job, found, _ = nccl_log.diagnose(log)
    links = sorted(
        {link.transport for link in job.links.values()}, key=lambda name: ["P2P", "SHM", "NET"].index(name[:3])
    )
    rows = [Result(one.code, one.severity, one.what, one.do) for one in found if one.severity != "note"]
    return (links[-1] if links else ""), rows


def slowest_topology(parts):
    """The longest way between two GPUs in use on one host, as `nvidia-smi topo -m` names it."""
    order = ["SYS", "NODE", "PHB", "PXB", "PIX"]
    kinds = []
    used = {rank: gpu["index"] for rank, gpu in used_gpus(parts).items()}
    for rank, index in used.items():
        kinds += [
            kind
            for pair, kind in parts[rank]["topology"].items()
            if pair.split()[0] == index and pair.split()[1] in used.values()
        ]
    return min(
        kinds,
        key=lambda kind: order.index(kind) if kind in order else 9 + nccl_log.product(re.findall(r"\d+", kind)),
        default="",
    )


# ── the whole ────────────────────────────────────────────────────────────────────────────────────────────────────────
def judge(facts, later, world_size, wanted):
    """Everything that was measured -> results, bandwidth rows. facts: rank -> dict, later: rank -> dict."""
    results = []
    missing = set(range(world_size)) - {*facts}
    if missing:
        fix = "look at their own output; were all --nnodes hosts started?"
        results.append(Result("ranks", "fail", f"{nccl_log.in_words(missing)} did not answer", fix))

    def part(name):
        """What `name` measured, by rank, where it worked; where not, that is a result."""
        errors = {rank: fact[name]["error"] for rank, fact in facts.items() if "error" in fact[name]}
        hangs = any(fact[name].get("hangs") for fact in facts.values())
        if errors:
            fix = "look at that device, file system or name server: it does not answer" if hangs else ""
            results.append(Result(name, "fail" if hangs else "unknown", differing(errors), fix))
        return {rank: fact[name] for rank, fact in facts.items() if "error" not in fact[name]}

    nodes = {fact["node"]: rank for rank, fact in sorted(facts.items(), reverse=True)}  # node -> its first rank
    names = {str(node): facts[rank]["network"].get("host", f"host {node}") for node, rank in nodes.items()}
    gpu = any(fact["gpus"].get("cuda") for fact in facts.values())
    rdma = [port for rank in nodes.values() for port in facts[rank]["network"].get("rdma", ())]
    per_node = max(fact["local_world_size"] for fact in facts.values())

    def gpu_facts(rank):
        said = facts[nodes[facts[rank]["node"]]]["nvidia-smi"]  # asked once per host
        return facts[rank]["gpus"] | {"listed": [], "programs": [], "topology": {}, "fabric": ""} | said

    def of_nodes(parts):
        return {node: rank for node, rank in nodes.items() if rank in parts}

    judges = {
        "software": judge_software,
        "nvidia-smi": lambda parts: [],
        "gpus": lambda parts: judge_gpus({rank: gpu_facts(rank) for rank in parts}, facts),
        "limits": lambda parts: judge_limits(parts, gpu, rdma, per_node),
        "settings": judge_settings,
        "network": lambda parts: judge_network(
            parts, {r: f["settings"] for r, f in facts.items()}, of_nodes(parts), gpu
        ),
        "machine": lambda parts: judge_machine(parts, of_nodes(parts), gpu, rdma),
        "disk": lambda parts: judge_disk(parts, wanted),
    }
    for name, function in judges.items():
        if parts := part(name):
            results += function(parts)
    reports = {str(facts[rank]["node"]): one["reach"] for rank, one in later.items() if one.get("reach")}
    for node, report in reports.items():
        if "error" in report:
            fix = "the address must belong to this host: see the interface above"
            results.append(Result("reach", "fail", f"{names[node]}: {report['error']}", fix))
    reports = {node: report for node, report in reports.items() if "error" not in report}
    results += judge_reach(reports, names) if reports else []
    for rank, one in later.items():
        copies = one.get("copy") or {}
        host = names[str(facts[rank]["node"])]
        if "error" in copies:
            results.append(Result("copies", "fail", f"{host}: {copies['error']}", "NCCL_P2P_DISABLE=1; newer driver"))
        elif copies.get("copies"):
            results += judge_copies(copies["copies"], host)
    results = list(dict.fromkeys(results))  # two nodes of torchrun may be one machine
    if not later:
        return results, []
    groups = {rank: one["collectives"] for rank, one in later.items()}
    groups |= {rank: {"error": "did not answer"} for rank in set(range(world_size)) - {*later}}
    transport, said = read_logs(groups)
    gpu_parts = {rank: gpu_facts(rank) for rank, fact in facts.items() if "error" not in fact["gpus"]}
    rates = [re.match(r"\d+", rate) for _, state, rate, _ in rdma if "ACTIVE" in state]
    gbit = sum(int(rate[0]) for rate in rates if rate) / len(nodes)
    expected = expected_bandwidth(transport, slowest_topology(gpu_parts), gbit) if transport else None
    more, rows = judge_collectives(groups, transport, expected)
    return results + more + said, rows


def table(results, rows):
    width = max(len(one.check) for one in results)
    out = []
    for one in results:
        out.append(f"{one.state:<8}{one.check:<{width}}  {one.found}")
        if one.fix and one.state != "ok":
            out.append(f"{'':<8}{'':<{width}}  do: {one.fix}")
    if rows:
        sizes = sorted({row["bytes"] for row in rows})
        out += ["", "GB/s (bus) " + "".join(f"{size(amount):>12}" for amount in sizes)]
        for operation in dict.fromkeys(row["operation"] for row in rows):
            speeds = [row["gb_per_s"] for row in rows if row["operation"] == operation]
            out.append(f"{operation:<11}" + "".join(f"{speed:12.3f}" for speed in speeds))
    bad = sum(one.state == "fail" for one in results)
    return "\n".join([*out, "", f"not fit: {bad} check{'s' * (bad > 1)} failed" if bad else "fit to train"])


def measure(rank, local_rank, local_world_size, options):
    """What this rank sees before it speaks to any other."""
    checks = {
        "software": (software,),
        "gpus": (gpus, local_rank),
        "nvidia-smi": (nvidia_smi, local_rank),
        "limits": (limits,),
        "settings": (settings,),
        "network": (network,),
        "machine": (machine, local_world_size),
        "disk": (disk, options.out),
    }
    found = {name: within(min(SECONDS[name], options.limit), *call) for name, call in checks.items()}
    where = {
        "node": int(os.environ.get("GROUP_RANK", 0)),
        "local_rank": local_rank,
        "local_world_size": local_world_size,
    }
    return found | where


def meet(store, group_store, rank, facts, options):
    """What needs the others: reach, copies between this host's GPUs, collectives."""
    mine, nodes = facts[rank], sorted({fact["node"] for fact in facts.values()})
    seconds = {name: min(SECONDS[name], options.limit) for name in ("reach", "copy", "collectives")}
    gpu, found = bool(mine["gpus"].get("cuda")), {}
    if mine["local_rank"] == 0:
        if chosen := chosen_interfaces(mine["network"], mine["settings"], gpu):
            arguments = store, mine["node"], nodes, chosen[0][1], seconds["reach"]
            found["reach"] = within(seconds["reach"] + 6 * len(nodes), reach, *arguments)
        n = mine["gpus"].get("visible", 0)
        if gpu and n > 1:
            pairs = [(a, b) for a in range(n) for b in range(n) if a != b]
            command = [sys.executable, __file__, "--copy"]
            found["copy"] = within(len(pairs) * seconds["copy"] + 60, watch_copies, pairs, seconds["copy"], command)
    post(store, f"met/{rank}", True)  # no collective while another process still copies on the same GPUs
    collect(store, [f"met/{other}" for other in facts], len(facts) ** 2 + 600)
    device = torch.device("cuda", mine["local_rank"]) if gpu else torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        arguments = group_store, rank, len(facts), device, seconds["collectives"], folder
        found["collectives"] = within(seconds["collectives"], collectives, *arguments)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs", help="where training will write (default: runs)")
    parser.add_argument("--disk", type=float, default=10, metavar="GiB", help="free space wanted there (default: 10)")
    parser.add_argument("--limit", type=float, default=600, metavar="SECONDS", help="longest time for any one check")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--copy", metavar="A:B,…", help=argparse.SUPPRESS)  # the process that copies between GPUs
    options = parser.parse_args()
    if options.copy:
        copy_pairs([tuple(map(int, pair.split(":"))) for pair in options.copy.split(",")])
        return 0
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    try:
        store, group_store = find_store(rank, world_size, min(SECONDS["facts"], options.limit))
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        print(f"error: rank {rank} does not reach torchrun's store at {address}: {error}", file=sys.stderr)
        return 1
    post(store, f"facts/{rank}", measure(rank, *local, options))
    facts = collect(store, [f"facts/{other}" for other in range(world_size)], SECONDS["facts"])
    facts = {int(key.split("/")[1]): fact for key, fact in facts.items()}
    later = {}
    if len(facts) == world_size:
        post(store, f"later/{rank}", meet(store, group_store, rank, facts, options))
        keys = [f"later/{other}" for other in range(world_size)] if rank == 0 else []
        later = {int(key.split("/")[1]): one for key, one in collect(store, keys, SECONDS["collectives"] + 30).items()}
    if rank == 0:
        results, rows = judge(facts, later, world_size, options.disk)
        code = int(any(one.state == "fail" for one in results))
        hosts = sorted({fact["network"].get("host", "?") for fact in facts.values()})
        checks = [one._asdict() for one in results]
        said = {"fit": not code, "ranks": world_size, "hosts": hosts, "checks": checks, "bandwidth": rows}
        print(json.dumps(said, indent=2) if options.json else table(results, rows), flush=True)
        post(store, "code", code)
        collect(
            store, [f"heard/{other}" for other in range(1, world_size)], 10
        )  # else torchrun ends them, and the store
    else:
        # torchrun ends the others as soon as one exits with 1, so nobody does before rank 0 has printed.
        waited = SECONDS["facts"] + SECONDS["collectives"] + 60
        code = collect(store, ["code"], waited).get("code", 1)
        post(store, f"heard/{rank}", True)
    sys.stdout.flush()
    os._exit(code)  # a thread may still hang in a driver


if __name__ == "__main__":
    sys.exit(main())
