"""Read the log of a torchrun job and say what went wrong first, or what makes it slow, and what to do.

    python tools/nccl_log.py FILE...        any number of ranks, hosts and files, interleaved or not
    torchrun ... 2>&1 | tee run.log         ; python tools/nccl_log.py run.log
    python tools/nccl_log.py - < run.log    standard input;  --json for programs,  --codes for all findings

How to capture a log worth reading:

    export NCCL_DEBUG=INFO NCCL_DEBUG_FILE=/tmp/nccl.%h.%p.log      %h host, %p process: one file per rank
    export TORCH_FR_BUFFER_SIZE=2000 TORCH_FR_DUMP_TEMP_FILE=/tmp/trace_      flight recorder, new names
    export TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DEBUG_INFO_TEMP_FILE=/tmp/trace_      the same, old names
    torchrun ... 2>&1 | tee run.log ; python tools/nccl_log.py run.log /tmp/nccl.*.log /tmp/trace_*

Without NCCL_DEBUG_FILE, NCCL writes to the C library's stdout. Into a pipe that is buffered in blocks: lines of a rank
arrive late, a block ends in the middle of a line and the next rank's text is glued to it, and what was still in the
buffer is lost when the process is killed. NCCL_DEBUG_FILE is written line by line.

The program reads four kinds of line: NCCL's own (2.14 to 2.31), PyTorch's watchdog, Python tracebacks, and the exit
summary of the launcher; flight-recorder dumps (pickle or JSON, one per rank) are joined to them. It then blames in this
order: a process that raised or was killed, the first warning NCCL printed, the pattern of the timeouts. What follows
from the first cause is counted and not listed. Standard library only: copy this one file to any machine.

Exit code: 0 ok or slow, 1 failed, 2 nothing recognised (or a wrong argument).
"""

import argparse
import io
import json
import os
import pickle
import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

LIMIT = 20_000  # entries kept of any one kind: memory stays bounded whatever the log holds
RANKS = 200_000  # a larger number in a damaged line is no rank
LINE = 1 << 16  # bytes looked at in one line
EVIDENCE = 6  # lines kept per finding
FORCED = 150  # lines after "Traceback" that are read even if nothing in them looks interesting


# ---------------------------------------------------------------------------------------------------------------------
# What can be found: code -> severity, what happened, why, what to do
# ---------------------------------------------------------------------------------------------------------------------
class Code(NamedTuple):
    severity: str
    what: str
    why: str
    fix: str


CODES = {
    # A process ended by itself or was ended.
    "out-of-memory": Code(
        "fail", "memory ran out", "the other ranks were left waiting for this one",
        "reduce --micro-batch or the largest resolution bucket, or use --activations checkpoint; "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against fragmentation; if NCCL itself found no room, "
        "leave it 1-2 GB, make fewer process groups or lower NCCL_BUFFSIZE"),
    "rank-killed": Code(
        "fail", "a process got SIGKILL",
        "nobody inside the job does that: the kernel's or the container's memory limit, or the scheduler",
        "look at dmesg and the cgroup's memory.events on that host (host memory, not GPU memory); use fewer "
        "--workers, less pinned memory, or ask the scheduler for more memory"),
    "rank-crashed": Code(
        "fail", "a process died in native code", "a signal such as SIGSEGV, SIGBUS or SIGABRT ended it",
        "SIGBUS in a container: enlarge /dev/shm; otherwise run with PYTHONFAULTHANDLER=1 and look at the last "
        "stack"),
    "rank-raised": Code(
        "fail", "a rank stopped with an error of its own", "the other ranks were left waiting for it",
        "fix that error; decorate main with torch.distributed.elastic's @record if the traceback is missing"),
    "gpu-fault": Code(
        "fail", "the GPU or its driver reported a fault",
        "ECC, Xid and launch failures end every later call on that GPU",
        "look for Xid in dmesg, run dcgmi diag -r 3, and take the GPU out of the job until it is reset or replaced"),
    "cuda-error": Code(
        "fail", "a CUDA kernel failed on one rank", "a wrong index or address in a kernel, seen at the next call",
        "run again with CUDA_LAUNCH_BLOCKING=1 to see the true line"),
    "invalid-device": Code(
        "fail", "a rank asked for a GPU that is not there",
        "more ranks than visible GPUs, or RANK used for LOCAL_RANK",
        "--nproc_per_node at most the number of GPUs in CUDA_VISIBLE_DEVICES; take the device from LOCAL_RANK"),
    "library-conflict": Code(
        "fail", "two copies of libnccl are mixed", "torch was built for another NCCL than the one loaded",
        "remove the second libnccl.so.2 from LD_LIBRARY_PATH and LD_PRELOAD; torch.cuda.nccl.version() shows the "
        "loaded one"),
    "port-in-use": Code(
        "fail", "the rendezvous port is taken", "another job or a leftover process listens on it",
        "torchrun --standalone, another --master_port, or end the leftover process"),
    # NCCL said so.
    "shm-too-small": Code(
        "fail", "/dev/shm is full",
        "ranks of one host exchange data through /dev/shm; a container gets 64 MB by default",
        "docker run --shm-size=1g or --ipc=host; Kubernetes: an emptyDir with medium Memory mounted on /dev/shm"),
    "duplicate-gpu": Code(
        "fail", "several ranks use the same GPU", "the device was hard-coded or chosen after the first collective",
        'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before init_process_group, or its device_id='),
    "mixed-nccl": Code(
        "fail", "ranks run different NCCL versions", "every rank must load the same build",
        "the same torch wheel or container on every host; look for a second libnccl.so.2 in LD_LIBRARY_PATH or "
        "LD_PRELOAD"),
    "no-interface": Code(
        "fail", "no usable network interface",
        "NCCL_SOCKET_IFNAME matches none, or leaves only ones without an address",
        "unset NCCL_SOCKET_IFNAME, or name an interface that `ip -br addr` shows as UP with an address on every "
        "host"),
    "nvls-fabric": Code(
        "fail", "the NVSwitch fabric refused",
        "Fabric Manager is down, differs from the driver, or was restarted under running GPUs",
        "check that nvidia-fabricmanager runs and has the driver's version; reset the GPUs or reboot after a "
        "restart of it; stop-gap NCCL_NVLS_ENABLE=0"),
    "imex": Code(
        "fail", "multi-node NVLink does not work", "the IMEX service or its channel is not available to this process",
        "start nvidia-imex on all nodes and give the container /dev/nvidia-caps-imex-channels; stop-gap "
        "NCCL_MNNVL_ENABLE=0"),
    "memlock": Code(
        "fail", "memory could not be locked for the network card", "the limit on locked memory is too low in the job",
        "ulimit -l unlimited inside the job (limits.conf, LimitMEMLOCK of the daemon, docker --ulimit memlock=-1)"),
    "cumem-host": Code(
        "fail", "host memory through cuMem does not work",
        "the driver, the container or differing settings prevent it",
        "NCCL_CUMEM_HOST_ENABLE=0 on every rank, or a newer driver"),
    "net-mismatch": Code(
        "fail", "hosts see different numbers of network cards", "channels to the missing cards have no peer and wait",
        "make the same NICs visible everywhere (NCCL_IB_HCA); do not set NCCL_IGNORE_NET_MISMATCH"),
    "loopback-interface": Code(
        "fail", "several hosts talk over the loopback interface",
        "each host then only reaches itself; an exclusion such as ^docker0 replaces NCCL's own exclusions, and lo "
        "is left",
        "NCCL_SOCKET_IFNAME=^docker0,lo, or name the interface that reaches the other hosts"),
    "wrong-interface": Code(
        "fail", "NCCL picked an interface that does not reach the other host",
        "bridges and virtual interfaces exist on every host with local, often equal, addresses",
        "unset NCCL_SOCKET_IFNAME, or name the NIC that reaches the other node"),
    "unreachable-peer": Code(
        "fail", "a TCP connection to another rank cannot be opened",
        "NCCL uses ephemeral ports: a rendezvous that works proves only one port",
        "open all TCP between the nodes, or pin net.ipv4.ip_local_port_range and open that range; check the chosen "
        "interface, and that no hostname resolves to localhost"),
    "rendezvous-failed": Code(
        "fail", "the ranks did not find each other",
        "MASTER_ADDR or MASTER_PORT is wrong or closed, or one node never started",
        "check MASTER_ADDR from every node, that the port is open, and that --nnodes nodes were started"),
    "roce-gid": Code(
        "fail", "RoCE cannot deliver the first packets", "the GID index does not fit the network",
        "unset NCCL_IB_GID_INDEX (NCCL 2.21 and later choose), or set the index of the RoCE v2 address (show_gids)"),
    "ib-mtu": Code(
        "fail", "the network card rejected a packet",
        "the MTU differs between nodes (NCCL 2.20 stopped adjusting), or memory was not registered",
        "set the same MTU on all ports (ibv_devinfo), then try NCCL_NET_GDR_LEVEL=LOC once"),
    "ib-error": Code(
        "fail", "the network card gave up on a peer", "the peer, its port or a switch stopped answering",
        "look at the peer's own log first; then ibstat, cables and switch counters of the named device"),
    # The pattern of the timeouts says so.
    "desync": Code(
        "fail", "ranks called different collectives", "they took different paths through the program",
        "the same calls in the same order on every rank: equal steps per rank (drop_last or a padded sampler), no "
        "collective inside an if on rank or data; or agree on stopping first"),
    "rank0-busy": Code(
        "fail", "rank 0 was still at work while the others waited",
        "long work on one rank before the first collectives",
        "do it beforehand (tools/encode.py) or share it over the ranks; raise timeout= in init_process_group; or "
        "wait with a gloo barrier"),
    "straggler": Code(
        "fail", "some ranks did not come to a collective", "the others waited for them until the limit",
        "look at those ranks first: last lines, py-spy dump, data loading, uneven steps per rank"),
    "p2p-hang": Code(
        "fail", "every rank waits in the same collective",
        "nobody is late: data sent from GPU to GPU does not arrive; the PCIe root redirects it (ACS, IOMMU) or the "
        "driver promises peer access it cannot keep",
        "confirm with one run of NCCL_P2P_DISABLE=1; then switch off ACS and IOMMU translation (BIOS, setpci, "
        "iommu=pt) and update the driver"),
    "net-hang": Code(
        "fail", "every rank waits in the same collective", "nobody is late: data between the hosts does not arrive",
        "test the links with nccl-tests between pairs of hosts; confirm with one run of NCCL_IB_DISABLE=1; compare "
        "NICs, MTU, GID and switch counters"),
    "timeout-unknown": Code(
        "fail", "a collective timed out", "this log does not show which rank was late",
        "read the logs of all ranks together, and record the flight: TORCH_FR_BUFFER_SIZE=2000 and "
        "TORCH_NCCL_TRACE_BUFFER_SIZE=2000 with their dump files"),
    "init-incomplete": Code(
        "fail", "communicators began and did not complete", "the ranks could not all connect, or some never came",
        "compare the interfaces below between hosts; start the missing ranks; tools/doctor.py tests the ports"),
    "peer-lost": Code(
        "fail", "a peer closed its connection", "it ended first; its own last lines are not shown in this log",
        "read the log of the other ranks: the first that ended has the cause"),
    "nccl-error": Code(
        "fail", "NCCL reported an error", "the cause is not shown in this log",
        "run again with NCCL_DEBUG=INFO and NCCL_DEBUG_FILE=/tmp/nccl.%h.%p.log"),
    # Works, but slowly.
    "p2p-unavailable": Code(
        "slow", "GPUs of one host exchange data through host memory",
        "direct access between these GPUs is not available",
        "nothing to repair on GeForce cards; fewer and larger all-reduces help: gradient accumulation, a larger "
        "local batch. Where peer access is expected, see `nvidia-smi topo -p2p r` and the IOMMU/ACS settings"),
    "p2p-disabled-by-user": Code(
        "slow", "direct access between GPUs is switched off by your own variable",
        "data goes through host memory instead",
        "unset NCCL_P2P_DISABLE and NCCL_P2P_LEVEL (also in /etc/nccl.conf and ~/.nccl.conf)"),
    "shm-disabled-by-user": Code(
        "slow", "NCCL_SHM_DISABLE sends data within a host over the network",
        "shared memory is faster than any NIC here",
        "unset NCCL_SHM_DISABLE; if /dev/shm was too small, enlarge it"),
    "same-host-over-net": Code(
        "slow", "ranks of one host talk over the network",
        "they do not share GPUs and /dev/shm, as in separate containers",
        "one container per host, or share both: --ipc=host (or a common /dev/shm), all GPUs visible, equal "
        "NCCL_HOSTID"),
    "ib-without-gdr": Code(
        "slow", "data between hosts is staged through host memory",
        "the links are RDMA but without GPUDirect (no /GDRDMA)",
        "modprobe nvidia-peermem on every node, or the open kernel driver with DMA-BUF; then check ACS and "
        "NCCL_NET_GDR_LEVEL"),
    "ib-unused": Code(
        "slow", "the hosts talk over TCP although RDMA could serve", "RDMA devices are listed or were switched off",
        "unset NCCL_IB_DISABLE and NCCL_NET; check NCCL_IB_HCA and that libibverbs and /dev/infiniband are in the "
        "container"),
    # Worth knowing.
    "spliced-log": Code(
        "note", "lines are cut and glued together", "several ranks wrote into one pipe, each buffered in blocks",
        "NCCL_DEBUG_FILE=/tmp/nccl.%h.%p.log, or /dev/stderr, which is written line by line"),
    "ib-port": Code(
        "note", "a network port reported an event", "ports that flap show up as timeouts later",
        "ibstat and the switch's counters, if it repeats"),
    "nccl-warning": Code(
        "note", "NCCL printed a warning this program does not know", "",
        "read the line"),
    "stopped": Code(
        "note", "the job was stopped from outside", "a signal to torchrun, or the scheduler's limit",
        "nothing, if intended; --save-every keeps the work"),
}

# ---------------------------------------------------------------------------------------------------------------------
# What lines mean. First match wins. NCCL's texts are those of 2.14 to 2.31, so most entries list several spellings.
# ---------------------------------------------------------------------------------------------------------------------
WARNINGS = [(code, re.compile(pattern)) for code, pattern in (
    ("cumem-host", r"shared memory segment .*\(size 0\)|shm\.cc\S* .*(?:Cuda failure 217|peer access is not supp)"),
    ("shm-too-small", r"failed to extend /dev/shm|(?:creating|attaching to) shared memory segment"),
    ("duplicate-gpu", r"Duplicate GPU detected|Multiple [Rr]anks (?:are|detected) using the same GPU"),
    ("mixed-nccl", r"Mismatched NCCL version|Message truncated : received|is neither AF_INET"),
    ("no-interface", r"no (?:socket |IP |usable )?interface found|No IP interface found"),
    ("p2p-unavailable", r"P2P is disabled between NVLINK|Cuda failure 217|peer access is not supported"),
    ("imex", r"MNNVL .*(?:not working|failed)|IMEX"),
    ("nvls-fabric", r"NVLink SHARP|NVLS\) Multicast|nvls\.cc\S* (?:\(\w+\) )?(?:Cuda|CUDA)|system not yet initialized"),
    ("memlock", r"ibv_\w+.*Cannot allocate memory"),
    ("net-mismatch", r"Detected mixed local \w+ device counts"),
    ("out-of-memory", r"out of memory|Failed to (?:CUDA|Cuda) (?:host )?[cm]alloc"),
    ("gpu-fault", r"uncorrectable|unspecified launch failure|over nvlink|hardware error"),
    ("ib-completion", r"Got completion (?:from|with)"),
    ("ib-port", r"Got async (?:fatal )?event"),
    ("roce-gid", r"ibv_modify_qp failed|Call to ibv_modify_qp"),
    ("peer-lost", r"[Cc]onnection closed|Connection reset|Broken pipe|remote process|wrong type \d|Accept failed"),
    ("unreachable-peer", r"[Cc]onnect (?:to|returned)\b.*(?:fail|return|refused|route)|No route to host|timed out"
                         r"|Connection refused|Network is unreachable|exceeded (?:error )?(?:retr|timeouts)"),
    ("ib-error", r"\bibv_\w+ failed|NET/IB"),
)]
INFORMATION = {  # INFO lines by their first word, because there are many of them
    "P2P": ("P2P is disabled between connected GPUs", "p2p-off"),
    "Could": ("Could not enable P2P between dev", "p2p-off"),
    "cuMem": ("cuMem host allocations do not appear", "cumem-note"),
    "GPU": ("GPU Direct RDMA Disabled", "gdr-off"),
    "Detected": ("Ignoring due to NCCL_IGNORE_NET_MISMATCH", "net-ignored"),
    "[Service": ("Connection closed", "closed"),
    **dict.fromkeys(("Call", "socketPollConnect:", "socketStartConnect:", "ncclOsSocketPollConnect:",
                     "ncclOsSocketStartConnect:"), ("retrying", "retrying"))}
ERRORS = [(code, re.compile(pattern)) for code, pattern in (  # PyTorch, Python, the launcher, the kernel
    ("out-of-memory", r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory|can't allocate memory: you"),
    ("shm-too-small", r"DataLoader worker.*[Bb]us error|insufficient shared memory|/dev/shm.*No space left"),
    ("rank-killed", r"DataLoader worker.*signal: Killed|oom[-_ ]kill|OOMKilled|Killed process \d+|: Out Of Memory"),
    ("gpu-fault", r"uncorrectable ECC|NVRM: Xid|fallen off the bus|CUDA error: unspecified launch failure"),
    ("nvls-fabric", r"system not yet initialized"),
    ("invalid-device", r"invalid device ordinal"),
    ("cuda-error", r"CUDA error: (?!out of)|device-side assert triggered|(?:CUBLAS|CUDNN)_STATUS_(?!SUCCESS)"),
    ("library-conflict", r"undefined symbol: nccl|libnccl\S* .*undefined symbol"),
    ("port-in-use", r"EADDRINUSE|Address already in use"),
    ("rendezvous-failed", r"client socket has (?:timed out|failed)|RendezvousTimeoutError|RendezvousConnectionError"),
    ("desync", r"Detected mismatch between collectives"),
    ("stopped", r"Received \d+ death signal|SignalException|CANCELLED AT|DUE TO TIME LIMIT|KeyboardInterrupt"),
)]
# Errors that a rank raises because another one is gone or late: never a cause.
AFTERMATH = re.compile(
    r"DistBackendError|DistStoreError|DistNetworkError|NCCL error|NCCL [Cc]ommunicator|nccl\w+Error|gloo/"
    r"|Connection (?:closed|reset) by (?:remote )?peer|Broken pipe|Timed out waiting|Socket Timeout|monitoredBarrier"
    r"|ProcessGroupNCCL|ChildFailedError|Process(?:Raised|Exited)Exception|CalledProcessError|SystemExit|wait timeout")
# What is only counted.
CONSEQUENCES = [(label, re.compile(pattern)) for label, pattern in (
    ("closed connection", r"Connection (?:closed|reset) by|Service thread\] (?:Connection closed|Accept failed)"),
    ("SIGTERM by the launcher", r"Sending process \d+ closing signal"),
    ("watchdog message", r"Some NCCL operations have failed|taking the entire process down|watchdog thread terminated"
                         r"|dump signal|watchdog got stuck|[Hh]eartbeat monitor"),
)]

CORE = re.compile(r" NCCL (INFO|WARN|TRACE|CALL|VERSION|ERROR) ?")
HEAD = re.compile(r"([\w.-]+):(\d+):(\d+)(?: \[-?\d+\])?(?: [\d.]+)?(?: ([\w./+-]+:\d+(?: \([^()]*\))?))?$")
TAG = re.compile(
    r"\s*(?:\[(?P<default>default\d{1,9})\]:?|\[rank ?(?P<rank>\d{1,9})\]:?"
    r"|\[\d{1,9},(?P<mpi>\d{1,9})\](?:<std\w+>)?:|(?P<srun>\d{1,5}): "
    r"|(?P<svc>[\w.-]+) +\| |\((?P<ray>[^()]{3,160})\) |\[(?P<pod>[\w./-]{3,120})\] "
    r"|\[?\d{4}-\d\d-\d\d[T ][\d:.,+]+Z?\]?(?: std(?:out|err) [FP])? )")
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
COMM = re.compile(
    r"comm (0x[0-9a-f]+) rank (\d{1,9}) n[rR]anks (\d{1,9})"
    r"(?: cudaDev (\d{1,9}))?(?: nvmlDev (\d{1,9}))?(?: busId ([0-9a-f]+))?")
NODES = re.compile(r"nNodes (\d{1,9}) localRanks \d{1,9}")
SPLIT = re.compile(r"parent (0x[0-9a-f]+).* color (-?\d{1,9})")
LINK = re.compile(
    r"Channel (\d{1,9})(?:/\d{1,9})? : (\d{1,9})\[(\w+)\] -> (\d{1,9})\[(\w+)\](?: \[(send|receive)\])? via "
    r"((P2P|SHM)/(?:CUMEM|IPC|MNNVL|direct pointer|direct|CE|indirect/\w+\[\w+\])(?:/\w+)*|NET/[^/]+/\d{1,9}[\w/()-]*)"
    r"(?: comm \S+.*)?\s*$")
RING = re.compile(r"Channel \d{1,9}/(\d{1,9}) :((?: +\d{1,9})+)\s*$")
INTERFACE = re.compile(r"Bootstrap ?: Using (?:\[\d{1,9}\])?([\w.@-]+):([^<\s]+)<")
ENVIRONMENT = re.compile(r"(NCCL_\w+) set (?:by environment )?to (.*?)\.?\s*$")
VERSION = re.compile(r"NCCL version (\d{1,9}\.\d{1,9}(?:\.\d{1,9})?)")
STATUS = re.compile(r"(?:status=(?:\w+\()?|with error )(\d{1,9})")
WATCHDOG = re.compile(
    r"\[Rank (\d{1,15})\]\s+Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d{1,15}), OpType=(\w+)"
    r"(?:, NumelIn=(\d{1,15}), NumelOut=(\d{1,15}))?(?:, TensorShape=\[([\d, ]*)\])?")
GROUP = re.compile(r"\[PG (?:ID )?(\d{1,9})(?: PG GUID ([^\s(\]]+))?(?: ?\([^)]*\))? Rank (\d{1,9})\]")
PROGRESS = re.compile(r"last enqueued (?:NCCL )?work: (-?\d{1,9}).*last completed (?:NCCL )?work: (-?\d{1,9})", re.I)
FRAME = re.compile(r'\s+File "(.+?)", line (\d{1,9}), in (\S+)')
RAISED = re.compile(r" ?((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?:: (.*))?$")
FAILED = re.compile(r"failed \(exitcode: (-?\d{1,9})\) local_rank: (\d{1,9}) \(pid: (\d{1,9})\)")
SUMMARY = re.compile(r"\b(host|rank|exitcode)\s+: (-?[\w.-]+)(?: \((?:local_rank|pid): (\d{1,9})\))?")
SIGNALLED = re.compile(
    r"rank (\d{1,9}) .*exited on signal (\d{1,9})|task (\d{1,9}): (Killed|Out Of Memory|Segmentation fault|Bus error)"
    r"|process (\d{1,9}) terminated with signal SIG(\w+)")
SIGNALS = {"Killed": 9, "Out Of Memory": 9, "KILL": 9, "Segmentation fault": 11, "SEGV": 11, "Bus error": 7, "ABRT": 6,
           "TERM": 15}
BARRIER = re.compile(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier")
LAGGING = re.compile(
    r"\[([\d, ]+)\] finished collective #\d{1,9}, but didn't join|ranks \[([\d, ]+)\] are the lagging ranks")
UNIQUE_ID = re.compile(r"retr\w+ ncclUniqueId from \[(\d{1,9})\]")
VIRTUAL = re.compile(r"(?:docker|br-|veth|virbr|cni|flannel|cali|tun|tap|wg|tailscale|vmnet|vboxnet|cilium|podman|lxc)")
# Only lines with one of these are looked at at all.
KEYS = [key.encode() for key in (
    "NCCL ", "Traceback", "rror", "exitcode", "local_rank", "host      :", "Root Cause", "Failures:", "KILL", "atchdog",
    "[PG ", "emory", "ignal", "kill", "Killed", "onitoredBarrier", "collective", "lagging", "%|", "Xid", "CUDA",
    "CANCELLED", "TIME LIMIT", "EADDRINUSE", "client socket", "This is usually", "Disable NVLS", "distributed",
    "fallen off", "Interrupt", "undefined symbol", ": task ")]
TOLD = {word[:4].encode() for word in (  # how the INFO messages begin that are read
    "Channel", "comm ", "ncclComm", "[Rank", "Bootstrap", "NET/IB", "Using network", "NCCL", *INFORMATION)}
POINTWISE = ("SEND", "RECV", "COALESCED", "SCATTER", "GATHER", "ALLTOALL", "ALLTOALL_BASE")  # may differ between ranks


# ---------------------------------------------------------------------------------------------------------------------
# What is kept while reading
# ---------------------------------------------------------------------------------------------------------------------
class Line(NamedTuple):
    file: str
    number: int
    text: str


class Who(NamedTuple):
    """How a line names its rank: some lines carry the rank, others a process or only the launcher's tag."""

    rank: int | None = None
    process: tuple | None = None
    tag: str = ""


@dataclass
class Hit:
    """One kind of event: where it was seen, on whom, how often."""

    lines: list = field(default_factory=list)
    whos: dict = field(default_factory=dict)  # an ordered set
    details: list = field(default_factory=list)
    count: int = 0


@dataclass
class Process:
    lines: int = 0
    interface: tuple | None = None  # name, address
    rdma: set = field(default_factory=set)  # IB, RoCE
    network: str = ""
    communicators: dict = field(default_factory=dict)  # pointer -> (group, rank)
    building: dict = field(default_factory=dict)  # thread -> group it is in the middle of


class Member(NamedTuple):
    process: tuple  # host, pid
    cuda: str | None
    nvml: str | None
    bus: str | None


@dataclass
class Group:
    """A communicator, seen from all its ranks."""

    size: int
    members: dict = field(default_factory=dict)  # rank in the group -> Member
    begun: set = field(default_factory=set)
    complete: set = field(default_factory=set)
    nodes: int = 0
    rings: Counter = field(default_factory=Counter)  # order of ranks -> channels listed
    channels: int = 0
    line: Line | None = None


@dataclass
class Work:
    """A collective that a rank is stuck in."""

    who: Who
    local: int
    seq: int
    op: str
    size: tuple  # elements in, out; None where not printed
    line: Line
    group: str = ""
    enqueued: int | None = None


@dataclass
class Exit:
    code: int
    line: Line
    pid: str = ""
    rank: int | None = None
    local: int | None = None
    host: str = ""
    root: bool = False


@dataclass
class Raised:
    who: Who
    error: str
    op: str  # the torch.distributed call it came out of
    line: Line
    place: str  # the user's own frame
    tagged: bool | None  # with a rank; None for a bare "error:" line, which counts only if a process ended badly


@dataclass
class State:
    files: list = field(default_factory=list)
    lengths: dict = field(default_factory=dict)
    recognised: bool = False
    processes: dict = field(default_factory=dict)
    groups: dict = field(default_factory=dict)
    links: dict = field(default_factory=dict)
    versions: dict = field(default_factory=dict)
    environment: dict = field(default_factory=dict)
    hits: dict = field(default_factory=dict)
    works: list = field(default_factory=list)
    progress: dict = field(default_factory=dict)  # (group, local rank) -> last enqueued
    exits: list = field(default_factory=list)
    forced: set = field(default_factory=set)
    raised: list = field(default_factory=list)
    gone: list = field(default_factory=list)
    after: Counter = field(default_factory=Counter)
    tags: dict = field(default_factory=dict)
    ranks: set = field(default_factory=set)  # ranks that PyTorch's lines carry
    bars: dict = field(default_factory=dict)  # tag -> last progress bar
    traces: dict = field(default_factory=dict)
    summaries: dict = field(default_factory=dict)
    last_error: dict = field(default_factory=dict)
    heads: dict = field(default_factory=dict)
    repeated: set = field(default_factory=set)
    dumps: dict = field(default_factory=dict)

    def hit(self, code, line, who=None, detail=""):
        hit = self.hits.setdefault(code, Hit())
        note(hit, line, who, detail)
        return hit


def note(hit, line, who=None, detail=""):
    hit.count += 1
    if who and len(hit.whos) < LIMIT:
        first = who not in hit.whos
        hit.whos[who] = None
        # Two lines per rank are enough evidence; the rest of the places goes to other ranks.
        if not first and len(hit.lines) >= 2:
            return
    if len(hit.lines) < EVIDENCE:
        hit.lines.append(line)
    if detail and len(hit.details) < LIMIT:
        hit.details.append(detail)


# ---------------------------------------------------------------------------------------------------------------------
# Reading: bytes -> interesting lines -> state
# ---------------------------------------------------------------------------------------------------------------------
def read(state, stream, name):
    """Fold one file into the state. Blocks are searched for keys as a whole; only lines that hold one are decoded."""
    state.files.append(name)
    start = stream.read(4096)
    if start[:1] == b"\x80" or start[:1] == b"{" and b'"entries"' in start:
        read_dump(state, start + stream.read(), name)
        return
    rest, number, forced, long = start, 1, 0, False
    while block := stream.read(1 << 20):
        block = rest + block
        end = block.rfind(b"\n") + 1
        if not end:  # a line longer than a block: its beginning is kept, the rest is passed over
            rest, long = block[:LINE], True
            continue
        forced = scan(state, block[:end], name, number, forced)
        number += block.count(b"\n", 0, end)
        rest, long = block[end:], False
    if rest:
        for piece in rest.splitlines(keepends=True):
            forced = scan(state, piece, name, number, forced, cut=not piece.endswith(b"\n") and not long)
            number += 1
    state.lengths[name] = number - 1


def scan(state, block, name, number, forced, cut=False):
    """Feed the interesting lines of a block, in order. Returns how many lines of the next block must be read."""
    starts = set()
    for key in KEYS:
        at = block.find(key)
        while at >= 0:
            if key == b"NCCL " and block.startswith(b"INFO ", at + 5) and block[at + 10:at + 14] not in TOLD:
                state.recognised = True
                at += 10  # this message tells nothing, but another may be glued to its line
            else:
                start, end = block.rfind(b"\n", 0, at) + 1, block.find(b"\n", at)
                if key != b"NCCL " or not known_line(state, block[start:end]):
                    starts.add(start)
                at = end
            at = block.find(key, at) if at >= 0 else -1
    begin, done = 0, 0
    queue = sorted(starts, reverse=True)
    while queue or forced:
        if forced:  # the lines of a traceback: nothing in them is a key
            start, forced = done, forced - 1
            if start >= len(block):
                return forced + 1
        else:
            start = queue.pop()
            if start < done:
                continue
        end = block.find(b"\n", start)
        end = len(block) if end < 0 else end
        number += block.count(b"\n", begin, start)
        begin, done = start, end + 1
        raw = block[start:min(end, start + LINE)]
        for part in raw.split(b"\r") if b"\r" in raw else (raw,):  # progress bars redraw their line
            forced = max(forced, feed(state, part.decode("utf-8", "replace"), name, number, cut and end == len(block)))
    return forced


def known_line(state, raw):
    """Was this very INFO line read before? Every communicator prints the same ones again. Links over the network are
    the exception: equal text may mean another peer."""
    if raw in state.repeated:
        return True
    if len(state.repeated) < LIMIT and len(raw) < 300 and b" INFO " in raw and b" via NET/" not in raw:
        state.repeated.add(raw)
    return False


def feed(state, text, name, number, cut):
    if not text.isprintable():
        text = ANSI.sub("", text)
    at = text.find(" NCCL ")
    if at < 0:
        return torch_line(state, text, Line(name, number, text[:400]))
    # Nearly all lines of a long log hold one INFO message behind a head that was seen before.
    if text.startswith("INFO ", at + 6) and (head := state.heads.get(text[:at])) and text.find(" NCCL ", at + 11) < 0:
        process, thread, _, _ = head
        if owner := state.processes.get(process):
            owner.lines += 1
            information(state, owner, process, thread, text[at + 11:], Line(name, number, text[:400]), cut)
            return 0
    if nccl_line(state, text, name, number, cut):
        state.recognised = True
        return 0
    return torch_line(state, text, Line(name, number, text[:400]))


# ---------------------------------------------------------------------------------------------------------------------
# NCCL's own lines
# ---------------------------------------------------------------------------------------------------------------------
def nccl_line(state, text, name, number, cut):
    """Take every NCCL message out of a line: a spliced line holds several. False if there is none."""
    cores = []
    for core in CORE.finditer(text):
        before = text[max(core.start() - 200, cores[-1][1].end() if cores else 0):core.start()]
        if (head := parse_head(state, before)) is not None:
            cores.append((head, core))
    line = Line(name, number, text[:400])
    if len(cores) > 1:
        state.hit("spliced-log", line)
    for i, ((process, thread, source, tag), core) in enumerate(cores):
        end = text.find(process[0] + ":" + process[1], core.end()) if i + 1 < len(cores) else len(text)
        last = i + 1 == len(cores)
        end = cores[i + 1][1].start() if not last and end < 0 else end
        message = text[core.end():end]
        owner = state.processes.get(process)
        if owner is None:
            if len(state.processes) >= LIMIT:
                continue
            owner = state.processes[process] = Process()
        owner.lines += 1
        if tag and len(state.tags) < LIMIT:
            state.tags.setdefault(tag, set()).add(process)
        if core[1] == "WARN":
            warning(state, f"{source or ''} {message}", line, Who(process=process, tag=tag))
        elif core[1] == "INFO":
            information(state, owner, process, thread, message, line, not last or cut)
    return bool(cores)


def parse_head(state, before):
    """`tags host:pid:thread [device] file:line` -> ((host, pid), thread, file:line, tag)."""
    if (known := state.heads.get(before)) is not None:
        return known
    match = HEAD.search(before)
    if not match:
        return None
    host, pid, thread, source = match.groups()
    head = ((host.split(".")[0], pid), thread, source, split_tag(before[:match.start()])[0])
    if len(state.heads) > LIMIT:
        state.heads.clear()
    state.heads[before] = head
    return head


def information(state, owner, process, thread, message, line, cut):
    word = message.split(" ", 1)[0]
    if word == "Channel":
        channel(state, owner, process, thread, message, line, cut)
    elif " rank " in message and "comm 0x" in message:
        communicator(state, owner, process, thread, message, line)
    elif word.startswith("Bootstrap"):
        if match := INTERFACE.match(message):
            owner.interface = match.groups()
    elif word == "NET/IB":
        owner.rdma.update(re.findall(r":\d+/(IB|RoCE)", message))
    elif word == "Using" and message.startswith("Using network ") and not cut:
        owner.network = message[14:].strip()
    elif word == "NCCL":
        if match := VERSION.match(message):
            version(state, match[1], line, Who(process=process))
    elif word.startswith("NCCL_"):
        if match := ENVIRONMENT.match(message):
            values = state.environment.setdefault(match[1], {})
            if len(values) < EVIDENCE or match[2] in values:
                note(values.setdefault(match[2], Hit()), line, Who(process=process))
    elif (known := INFORMATION.get(word)) and known[0] in message:
        state.hit(known[1], line, Who(process=process), message.strip()[:200])


def version(state, number, line, who):
    if len(state.versions) < EVIDENCE or number in state.versions:
        note(state.versions.setdefault(number, Hit()), line, who)


def communicator(state, owner, process, thread, message, line):
    """Init START, nRanks and Init COMPLETE lines: who is which rank of which communicator."""
    match = COMM.search(message)
    if not match or not (("Init " in message) or "nNodes" in message):
        return
    pointer, rank, size, cuda, nvml, bus = match.groups()
    rank = int(rank)
    member = Member(process, cuda, nvml, bus)
    key = group_key(state, owner, message, pointer, rank, int(size), member)
    if key is None:
        return
    group = state.groups.setdefault(key, Group(int(size), line=line))
    if cuda is not None or rank not in group.members:
        group.members.setdefault(rank, member)
    owner.communicators[pointer] = (key, rank)
    if nodes := NODES.search(message):
        group.nodes = int(nodes[1])
    if "Init COMPLETE" in message:
        group.complete.add(rank)
        owner.building.pop(thread, None)
    else:
        group.begun.add(rank)
        owner.building[thread] = key


def group_key(state, owner, message, pointer, rank, size, member):
    """The same value on every rank of a communicator, from what its version prints."""
    if rank >= size or size > RANKS or (pointer not in owner.communicators and len(state.groups) >= LIMIT):
        return None
    if match := re.search(r"commId (0x[0-9a-f]+)", message):
        return ("id", match[1], size)
    if split := SPLIT.search(message):
        parent = owner.communicators.get(split[1], (split[1],))[0]
        return ("split", parent, split[2], size)
    if pointer in owner.communicators and state.groups[owner.communicators[pointer][0]].size == size:
        return owner.communicators[pointer][0]
    # Before 2.18.3 nothing tells two communicators of one size apart: take the first whose place is free.
    for copy in range(1000):
        key = ("size", size, copy)
        taken = state.groups[key].members.get(rank) if key in state.groups else None
        if taken is None or taken.process == member.process:
            return key
    return None


def channel(state, owner, process, thread, message, line, cut):
    building = owner.building.get(thread)
    if link := LINK.match(message):
        number, a, card_a, b, card_b, direction, transport, _ = link.groups()
        if cut or (direction is None) == transport.startswith("NET/"):
            return
        if transport.startswith("NET/"):
            name = transport.split("/")[1]
            transport = f"NET/{name}/GDRDMA" if "/GDRDMA" in transport else f"NET/{name}"
        key = (process, building, int(a), card_a, int(b), card_b, direction == "receive", transport)
        if key in state.links or len(state.links) < LIMIT:
            state.links.setdefault(key, (set(), line))[0].add(int(number))
    elif not cut and " -> " not in message and (ring := RING.match(message)):
        group = state.groups.get(building)
        order = tuple(map(int, ring[2].split()))
        if group and len(order) == group.size and (len(group.rings) < 64 or order in group.rings):
            group.rings[order] += 1
            group.channels = int(ring[1])


def warning(state, text, line, who):
    """A WARN line, or the text of one repeated by PyTorch under `Last error:`."""
    for code, pattern in WARNINGS:
        if pattern.search(text):
            state.hit(code, line, who, text.strip()[:300])
            if code == "peer-lost":
                state.after["closed connection"] += 1
            return True
    if who.process:
        state.hit("nccl-warning", line, who, text.strip()[:200])
    return False


def count_consequences(state, text):
    for label, pattern in CONSEQUENCES:
        if pattern.search(text):
            state.after[label] += 1
            return True
    return False


# ---------------------------------------------------------------------------------------------------------------------
# PyTorch, Python, the launcher
# ---------------------------------------------------------------------------------------------------------------------
def split_tag(text):
    """`[default1]:[rank3]: text` -> tag, rank, text. Time stamps are taken off too, but are no part of the tag."""
    tags, rank, at = [], None, 0
    while (match := TAG.match(text, at)) and match.end() > at:
        at = match.end()
        kind = match.lastgroup
        if kind:
            tags.append(match[kind])
        if kind == "rank":
            rank = int(match[kind])
        elif kind == "ray" and (inner := re.search(r"rank=(\d+)", match["ray"])):
            rank = int(inner[1])
    return "/".join(tags), rank, text[at:]


def torch_line(state, text, line):
    """Everything that is not NCCL's. Returns how many of the following lines must be read."""
    tag, rank, rest = split_tag(text)
    who = Who(rank=rank, tag=tag)
    stream = (line.file, tag)
    if rank is not None and len(state.ranks) < LIMIT:
        state.ranks.add(rank)
    if "Traceback (most recent call last):" in rest:
        state.recognised = True
        if stream in state.traces or len(state.traces) < LIMIT:
            state.traces[stream] = ["", ""]
        return FORCED
    if stream in state.traces and traceback_line(state, stream, rest, who, line):
        return 0
    if "%|" in text:
        if len(state.bars) < LIMIT:
            state.bars[tag] = (who, line)
        return 0
    if state.last_error.get(stream, 0) > 0:
        state.last_error[stream] -= 1
        if warning(state, rest, line, who):
            state.last_error[stream] = 0
            return 0
    if "Last error:" in text and len(state.last_error) < LIMIT:
        state.last_error[stream] = 2
        return 2
    if text.startswith(("This is usually caused by", "Disable NVLS")):  # NCCL's only warning of three lines
        if (hit := state.hits.get("nvls-fabric")) and hit.lines[-1].number == line.number - 1:
            note(hit, line)
        return 0
    if watchdog_line(state, text, who, line) or exit_line(state, text, stream, line):
        state.recognised = True
        return 0
    if match := VERSION.search(text):
        state.recognised = True
        # The bare line is printed by rank 0 only (up to 2.21); PyTorch's errors end in the version of their rank.
        version(state, match[1], line, who if rank is not None else Who(rank=0))
    if "torch/distributed" in text or "torch.distributed" in text or "ProcessGroup" in text:
        state.recognised = True
    if not count_consequences(state, text):
        error_line(state, rest, who, line)
    return 0


def traceback_line(state, stream, rest, who, line):
    trace = state.traces[stream]
    if frame := FRAME.match(rest):
        path, number, function = frame.groups()
        if path.endswith("distributed_c10d.py"):
            trace[1] = function
        elif "site-packages" not in path and "/lib/python" not in path and "/torch/" not in path:
            trace[0] = f"{os.path.basename(path)}:{number}"
        return True
    if rest.startswith("  ") or not (match := RAISED.match(rest)) or match[1] in ("Original", "Exception raised from"):
        return False
    del state.traces[stream]
    raised(state, match[1], match[2] or "", trace, who, line)
    return True


def raised(state, name, message, trace, who, line):
    """The last line of a traceback: an error of this rank, or the echo of another rank's end?"""
    text = f"{name}: {message}"[:300]
    if match := VERSION.search(text):
        version(state, match[1], line, who)
    if barrier_line(state, text, who, line) or error_line(state, text, who, line):
        return
    kept = Raised(who, text, trace[1], line, trace[0], bool(who.tag))
    if AFTERMATH.search(text):
        if "ChildFailed" not in name and len(state.gone) < LIMIT:
            state.gone.append(kept)
        count_consequences(state, text)
    elif name not in ("SystemExit", "KeyboardInterrupt") and len(state.raised) < LIMIT:
        state.raised.append(kept)


def error_line(state, text, who, line):
    if text.startswith("error: ") and len(state.raised) < LIMIT:  # this project's own one-line errors
        state.raised.append(Raised(who, text[7:300], "", line, "", None))
        return True
    for code, pattern in ERRORS:
        if pattern.search(text):
            state.recognised = True
            state.hit(code, line, who, text.strip()[:300])
            return True
    return False


def barrier_line(state, text, who, line):
    """Lines in which PyTorch itself names the ranks that did not come."""
    match = BARRIER.search(text) or LAGGING.search(text) or UNIQUE_ID.search(text)
    if match:
        for number in re.findall(r"\d{1,9}", next(group for group in match.groups() if group)):
            state.hit("straggler", line, Who(rank=int(number)), text.strip()[:200])
    return bool(match)


def watchdog_line(state, text, who, line):
    if barrier_line(state, text, who, line):
        return True
    if match := WATCHDOG.search(text):
        local, seq, op, n_in, n_out, shape = match.groups()
        size = (int(n_in), int(n_out)) if n_in else None
        if shape is not None:
            size = (product(re.findall(r"\d{1,15}", shape)),) * 2
        work = Work(who if who.rank is not None else Who(rank=int(local), tag=who.tag),
                    int(local), int(seq), op, size, line)
        known = any(w.who.rank == work.who.rank and w.seq == work.seq and w.op == op for w in state.works[-64:])
        if not known and len(state.works) < LIMIT:
            state.works.append(work)
        return True
    if not (match := GROUP.search(text)):
        return False
    group, local = match[2] or match[1], int(match[3])
    if status := PROGRESS.search(text):
        if len(state.progress) < LIMIT:
            state.progress[group, local] = int(status[1])
        rank = who.rank if who.rank is not None else local
        for work in reversed(state.works[-64:]):
            if work.who.rank == rank and not work.group:
                work.group, work.enqueued = group, int(status[1])
                break
        state.hit("watchdog", line, Who(rank=rank))
    count_consequences(state, text)
    return True


def product(sizes):
    total = 1
    for size in sizes:
        total *= int(size) if str(size).isdigit() else 0
    return total


def exit_line(state, text, stream, line):
    """How processes ended: torchrun's line, its summary, mpirun, srun, torch.multiprocessing."""
    if len(state.exits) >= LIMIT or len(state.summaries) >= LIMIT:
        return False
    if match := FAILED.search(text):
        state.exits.append(Exit(int(match[1]), line, pid=match[3], local=int(match[2])))
    elif "Root Cause" in text or "Failures:" in text:
        state.summaries[stream] = {"root": "Root Cause" in text}
    elif match := re.search(r"process (\d+) via (?:Signals\.)?SIGTERM, forcefully|forcefully.*?process (\d+)", text):
        state.forced.add(match[1] or match[2])
    elif match := SIGNALLED.search(text):
        rank, number, task, how, spawned, name = match.groups()
        signal = int(number or SIGNALS.get(how or name, 0))
        if signal:
            state.exits.append(Exit(-signal, line, rank=int(next(r for r in (rank, task, spawned) if r)), root=True))
    elif (match := SUMMARY.search(text)) and stream in state.summaries:
        entry = state.summaries[stream]
        entry[match[1]] = match[2]
        if match[1] == "rank":
            entry["local"] = match[3]
        numbers = f"{entry.get('rank')} {entry.get('exitcode')}"
        if match[1] == "exitcode" and re.fullmatch(r"\d{1,9} -?\d{1,9}", numbers):
            state.exits.append(Exit(int(match[2]), line, match[3] or "", int(entry["rank"]),
                                    int(entry.get("local") or 0), entry.get("host", ""), entry["root"]))
    else:
        return False
    return True


# ---------------------------------------------------------------------------------------------------------------------
# The flight recorder: one dump per rank
# ---------------------------------------------------------------------------------------------------------------------
class Refused(Exception):
    """A dump that is not what PyTorch writes."""


class PlainUnpickler(pickle.Unpickler):
    """Dumps hold dicts, lists, tuples, strings and numbers; a pickle that asks for more could run code."""

    def find_class(self, module, name):
        raise Refused(f"asks for {module}.{name}; only plain containers are read")

    def persistent_load(self, pid):
        raise Refused("asks for an object outside the file; only plain containers are read")


def read_dump(state, data, name):
    try:
        dump = json.loads(data) if data[:1] == b"{" else PlainUnpickler(io.BytesIO(data)).load()
        entries = [entry for entry in dump["entries"] if isinstance(entry, dict)]
        dump["pg_config"] = {str(name): dict(config) for name, config in (dump.get("pg_config") or {}).items()}
        rank = re.findall(r"\d{1,9}", os.path.basename(name).removesuffix(".json").removesuffix(".pkl"))
        state.dumps[int(rank[-1]) if rank else len(state.dumps)] = (name, dump, entries[-LIMIT:])
    except Refused as error:
        raise Refused(f"{name}: {error}") from None
    except Exception as error:
        raise Refused(f"{name}: not a flight-recorder dump ({type(error).__name__})") from None
    state.recognised = True
    state.lengths[name] = 1


def works_of_dumps(state):
    """The collective each rank is stuck in, per process group, as if its watchdog had spoken."""
    calls = defaultdict(lambda: defaultdict(dict))  # group -> sequence number -> rank -> entry
    members = {}
    for rank, (_, dump, entries) in state.dumps.items():
        for entry in entries:
            group = str(entry.get("process_group", entry.get("pg_id", "")))
            if not entry.get("is_p2p") and isinstance(entry.get("collective_seq_id"), int):
                calls[group][entry["collective_seq_id"]].setdefault(rank, entry)
                name = entry.get("process_group")
                config = dump["pg_config"].get(str(name[0]) if isinstance(name, list | tuple) and name else "")
                listed = re.findall(r"\d{1,9}", str((config or {}).get("ranks", "")))
                members.setdefault(group, set()).update(map(int, listed) if listed else [rank])
    for group, by_seq in calls.items():
        last = {rank: seq for seq in sorted(by_seq) for rank in by_seq[seq]}
        last = {rank: last.get(rank, 0) for rank in members[group] & set(state.dumps)}
        for seq in sorted(by_seq):
            ranks = by_seq[seq]
            stuck = {rank: entry for rank, entry in ranks.items() if not completed(entry)}
            late = [rank for rank in last if last[rank] < seq]
            calls_now = {rank: signature(entry) for rank, entry in ranks.items()}
            if stuck and (late or len(stuck) == len(ranks)) or mismatch(calls_now):
                for rank in late:
                    state.progress["recorder " + group, rank] = last[rank]
                for rank, entry in ranks.items():
                    name, size = calls_now[rank]
                    text = f"collective {seq} {name} {entry.get('state', '')} {frame(entry)}"
                    line = Line(state.dumps[rank][0], 1, text)
                    yield Work(Who(rank=rank), rank, seq, name, size, line, "recorder " + group, last.get(rank))
                break


def completed(entry):
    if str(entry.get("profiling_name")).startswith("gloo"):  # gloo's states are never updated; it retires what is done
        return bool(entry.get("retired"))
    return entry.get("state") == "completed" or bool(entry.get("time_discovered_completed_ns"))


def signature(entry):
    name = str(entry.get("profiling_name", "?")).split(":")[-1].upper()
    sizes = (entry.get("input_sizes") or [], entry.get("output_sizes") or [])
    return name, tuple(sum(product(shape) for shape in shapes if isinstance(shape, list | tuple)) for shapes in sizes)


def frame(entry):
    own = [f for f in entry.get("frames") or [] if isinstance(f, dict) and "/torch/" not in str(f.get("filename"))]
    return f"at {os.path.basename(str(own[0].get('filename')))}:{own[0].get('line')}" if own else ""


def mismatch(calls):
    """Do these ranks' calls, {rank: (operation, size)}, contradict each other?"""
    ops = {op for op, _ in calls.values()}
    sizes = {size[0] for _, size in calls.values() if size}
    return not any(op.strip("_") in POINTWISE for op in ops) and (len(ops) > 1 or len(sizes) > 1)


# ---------------------------------------------------------------------------------------------------------------------
# Who is where
# ---------------------------------------------------------------------------------------------------------------------
@dataclass
class Link:
    transport: str
    channels: int
    hosts: tuple  # of sender and receiver; None where the log does not say
    line: Line


@dataclass
class Job:
    """What was read, and which rank is which process on which host."""

    state: State
    alias: dict  # spliced spelling of a process -> its true one
    rank_of: dict = field(default_factory=dict)  # process -> rank in the job
    rows: dict = field(default_factory=dict)  # rank -> Member
    hosts: dict = field(default_factory=dict)  # host -> processes
    size: int = 0
    nodes: int = 0
    guessed: bool = False
    links: dict = field(default_factory=dict)  # (from, to) -> Link


def locate(state):
    job = Job(state, true_names(state))
    for process in state.processes:
        process = job.alias.get(process, process)
        job.hosts.setdefault(process[0], []).append(process)
    if state.groups:
        number_ranks(job)
    seen = set(job.rows) | set(state.dumps) | state.ranks | {e.rank for e in state.exits if e.rank is not None}
    seen |= {work.who.rank for work in state.works if work.who.rank is not None}
    job.size = max(job.size, 1 + max((rank for rank in seen if rank < RANKS), default=-1), len(job.rows))
    job.nodes = max([group.nodes for group in state.groups.values()] + [len(job.hosts)])
    connect(job)
    return job


def true_names(state):
    """A cut line glues text to a host name or takes a piece off it: what most lines spell is true."""
    alias, by_pid, weight = {}, defaultdict(list), Counter()
    for process, seen in state.processes.items():
        by_pid[process[1]].append(process)
        weight[process[0]] += seen.lines
    for same in by_pid.values():
        same.sort(key=lambda process: -weight[process[0]])
        for i, odd in enumerate(same):
            for true in same[:i]:
                rare = "spliced-log" in state.hits and 3 * weight[odd[0]] < weight[true[0]]
                if rare or odd[0].endswith(true[0]) or true[0].endswith(odd[0]):
                    alias[odd] = true
                    break
    if "spliced-log" in state.hits:  # a piece of a host name is no host: only those with a rank count
        members = {alias.get(member.process, member.process)[0]
                   for group in state.groups.values() for member in group.members.values()}
        for process in [process for process in state.processes if alias.get(process, process)[0] not in members]:
            if members:
                del state.processes[process]
    return alias


def number_ranks(job):
    """Ranks of the job are those of the largest communicator; where none spans all, host and GPU order is a guess."""
    largest = max(job.state.groups.values(), key=lambda group: (group.size, len(group.members)))
    job.size = largest.size
    members = {}
    for group in job.state.groups.values():
        for member in group.members.values():
            process = job.alias.get(member.process, member.process)
            members.setdefault(process, member._replace(process=process))
    job.rows = {rank: member._replace(process=job.alias.get(member.process, member.process))
                  for rank, member in sorted(largest.members.items())}
    job.rank_of = {member.process: rank for rank, member in job.rows.items()}
    missing = [process for process in members if process not in job.rank_of]
    if missing and len(members) > largest.size:
        job.guessed = True
        hosts = {host: number for number, host in enumerate(job.hosts)}
        order = sorted(members, key=lambda process: (hosts.get(process[0], 0), int(members[process].cuda or 0)))
        job.rank_of = {process: rank for rank, process in enumerate(order)}
        job.rows = {rank: members[process] for process, rank in job.rank_of.items()}


def connect(job):
    """Link lines carry ranks of their communicator but not its name: find it, then translate to ranks of the job."""
    found = defaultdict(list)
    for (process, building, a, card_a, b, card_b, receives, transport), (numbers, line) in job.state.links.items():
        process = job.alias.get(process, process)
        group = group_of_link(job, process, building, (a, card_a), (b, card_b), receives)
        ends = [rank_in_job(group, job, rank) for rank in (a, b)]
        channels = max(len(numbers), announced(group, a, b)) if group else len(numbers)
        (sender, host_a), (receiver, host_b) = ends
        found[sender, receiver].append((transport, channels, (host_a, host_b), numbers, line))
    for pair, seen in found.items():
        # Sender and receiver both print NET links. One side without GPUDirect is enough to be slow.
        slowest = max(seen, key=lambda one: (one[0][:3] == "NET", one[0][:3] == "SHM", "GDRDMA" not in one[0]))
        same = [one for one in seen if one[0] == slowest[0]]
        channels = max(max(one[1] for one in same), len(set().union(*(one[3] for one in same))))
        job.links[pair] = Link(slowest[0], channels, slowest[2], slowest[4])


def group_of_link(job, process, building, a, b, receives):
    if building in job.state.groups:
        return job.state.groups[building]
    own, candidates = (b if receives else a)[0], []
    for group in job.state.groups.values():
        member = group.members.get(own)
        if member and job.alias.get(member.process, member.process) == process and max(a[0], b[0]) < group.size:
            cards = [(group.members[rank], card) for rank, card in (a, b) if rank in group.members]
            # The number in brackets is the bus up to 2.18.1 and the NVML index after it.
            fits = all(card in (m.nvml, m.bus) or m.nvml is None and m.bus is None for m, card in cards)
            candidates.append((fits, group.size, len(candidates), group))
    return max(candidates)[3] if candidates else None


def rank_in_job(group, job, rank):
    member = group.members.get(rank) if group else None
    if member is None:
        known = job.rows.get(rank) if group is None or group.size == job.size else None
        return rank, known.process[0] if known else None
    process = job.alias.get(member.process, member.process)
    return job.rank_of.get(process, rank), process[0]


def announced(group, a, b):
    """Channels on a link by the ring headers, which may list only a few of them: 'Channel 00/24 : 0 1 2 3'."""
    listed = sum(group.rings.values())
    through = sum(n for order, n in group.rings.items() if a in order and order[(order.index(a) + 1) % len(order)] == b)
    return round(group.channels * through / listed) if listed else 0


def rank_of(job, who):
    """The rank behind a line, as far as the log tells."""
    if who.rank is not None:
        return who.rank
    if who.process:
        return job.rank_of.get(job.alias.get(who.process, who.process))
    owners = {job.alias.get(process, process) for process in job.state.tags.get(who.tag, ())}
    if len(owners) == 1:
        return job.rank_of.get(owners.pop())
    # mpirun's and srun's numbers are ranks unless a task holds several; torchrun's default3 is one on a single host.
    number = re.fullmatch(r"(?:.*/)?(default)?(\d{1,9})", who.tag)
    return int(number[2]) if number and not owners and not (number[1] and len(job.hosts) > 1) else None


def ranks_of(job, whos):
    return sorted({rank for rank in (rank_of(job, who) for who in whos) if rank is not None})


# ---------------------------------------------------------------------------------------------------------------------
# Rules, in the order of blame
# ---------------------------------------------------------------------------------------------------------------------
class Finding(NamedTuple):
    code: str
    severity: str
    what: str
    why: str
    fix: str
    ranks: list
    lines: list


def finding(code, ranks=(), lines=(), detail="", severity=None, why=None, fix=None):
    known = CODES[code]
    what = f"{known.what}: {detail}" if detail else known.what
    return Finding(code, severity or known.severity, what, known.why if why is None else why, fix or known.fix,
                   sorted(ranks), list(lines)[:EVIDENCE])


def of_hit(job, code, hit, detail=None, severity=None):
    return finding(code, ranks_of(job, hit.whos), hit.lines, detail_of(hit) if detail is None else detail, severity)


DIED = ("out-of-memory", "rank-killed", "gpu-fault", "invalid-device", "library-conflict", "port-in-use", "cuda-error")
SAID = ("cumem-host", "shm-too-small", "duplicate-gpu", "mixed-nccl", "no-interface", "p2p-unavailable", "imex",
        "nvls-fabric", "memlock", "net-mismatch")


def diagnose(state):
    """All findings, first cause first; and the consequences, counted."""
    state.works.extend(works_of_dumps(state))
    job = locate(state)
    after = Counter(state.after)
    died, said = deaths(job), warnings(job)
    blamed = {rank for one in said for rank in one.ranks}
    echoes = [one for one in died if one.code == "rank-raised" and said and set(one.ranks) <= blamed]
    causes = [one for one in died if one not in echoes] + said
    causes = causes or network(job) or hangs(job) or unexplained(job)
    if state.works and not any(one.code in HANGS for one in causes):
        after["watchdog timeout"] += len(state.works)
    after["error of a waiting rank"] += len(state.gone) + len(echoes)
    after["closed connection"] += state.hits["closed"].count if "closed" in state.hits else 0
    if causes:
        for code, label in (("unreachable-peer", "failed connection"), ("ib-completion", "failed network card request"),
                            ("rendezvous-failed", "failed rendezvous"), ("stopped", "stop signal")):
            if code in state.hits and not any(one.lines and one.lines[0] in state.hits[code].lines for one in causes):
                after[label] += state.hits[code].count
    slow, notes = slowness(job), remarks(job, causes)
    if any(one.severity == "fail" for one in causes):  # speed comes second once something has failed
        slow = [one._replace(severity="note") for one in slow]
    return job, causes + slow + notes, +after


def position(state, line):
    return state.files.index(line.file), line.number


def deaths(job):
    """Ranks that ended by themselves or were killed; the launcher's first observed failure leads."""
    found, exits = [], merged_exits(job.state)
    roots = {exit_rank(job, e) for e in exits if e.root} - {None}
    for code in DIED:
        if hit := job.state.hits.get(code):
            found.append(of_hit(job, code, hit))
    for e in exits:
        signal = -e.code if e.code < 0 else e.code - 128 if e.code > 128 else 0
        rank = exit_rank(job, e)
        ranks = [] if rank is None else [rank]
        where = (f"rank {rank}" if ranks else f"pid {e.pid}") + (f" on {e.host}" if named(e.host) else "")
        if signal == 9 and e.pid not in job.state.forced and (e.root or not roots):
            found.append(finding("rank-killed", ranks, [e.line], f"{where}, exit code {e.code}"))
        elif signal in (4, 7, 8, 11):
            found.append(finding("rank-crashed", ranks, [e.line], f"{where}, signal {signal}"))
    for error, same in errors(job.state).items():
        lines = [one.line for one in same]
        place_of = f" ({same[0].place})" if same[0].place else ""
        ranks = ranks_of(job, [one.who for one in same])
        if not ranks and len(roots) == 1 and not same[0].tagged:  # without a tag: the launcher knows whose it is
            ranks = sorted(roots)
        found.append(finding("rank-raised", ranks, lines, error + place_of))
    found = merged(found)
    found.sort(key=lambda one: (not set(one.ranks) & roots, position(job.state, one.lines[0])))
    return found


def named(host):
    return host not in ("", "localhost")


def merged(found):
    """Several ranks that ended in one way are one finding, and so are the kernel's line and the launcher's."""
    kept = []
    for one in found:
        for i, other in enumerate(kept):
            if one.code == other.code != "rank-raised":
                ranks, lines = sorted({*other.ranks, *one.ranks}), (other.lines + one.lines)[:EVIDENCE]
                kept[i] = other._replace(ranks=ranks, lines=lines)
                break
        else:
            kept.append(one)
    return kept


def detail_of(hit):
    return hit.details[0][:240] if hit.details else ""


def errors(state):
    """Uncaught Python errors by text. One without a rank's tag may have been caught and only printed: then the log
    goes on long after it and no process ends badly."""
    bad = any(e.code not in (0, -15, 143) for e in state.exits)
    kept = defaultdict(list)
    for one in state.raised:
        at_the_end = one.tagged is False and state.lengths.get(one.line.file, 0) - one.line.number < 20
        if one.tagged or bad or at_the_end:
            kept[one.error].append(one)
    return kept


def merged_exits(state):
    """torchrun prints an exit twice: at once with the pid, and in its summary with the rank."""
    kept = []
    for e in state.exits:
        for other in kept:
            if e.pid and e.pid == other.pid and e.code == other.code:
                other.rank = e.rank if other.rank is None else other.rank
                other.host = other.host if named(other.host) else e.host
                other.root = other.root or e.root
                break
        else:
            kept.append(Exit(**vars(e)))
    for e in kept:  # the line that is printed at once is the first failure that agent saw
        e.root = e.root or "failed (exitcode" in e.line.text
    return kept


def exit_rank(job, e):
    if e.rank is not None:
        return e.rank
    owners = {process for process in job.rank_of if process[1] == e.pid}
    if len(owners) == 1:
        return job.rank_of[owners.pop()]
    return e.local if len(job.hosts) < 2 else None


def warnings(job):
    """NCCL's warnings that name a cause. Of several from one process the first is the deepest in the call chain."""
    hits = sorted(((code, job.state.hits[code]) for code in SAID if code in job.state.hits),
                  key=lambda item: position(job.state, item[1].lines[0]))
    found, explained = [], set()
    for code, hit in hits:
        owners = {who for who in hit.whos if who.process}
        if owners and owners <= explained:
            job.state.after["later warning"] += hit.count
            continue
        explained |= owners
        severity, lines = "fail", hit.lines
        complete = any(group.complete for group in job.state.groups.values())
        if code == "nvls-fabric" and complete and not failing(job.state):
            severity = "slow"  # 2.27 and 2.28 go on without NVLS
        one_version = len(job.state.versions) < 2
        if "is neither" in detail_of(hit) and one_version and setting(job.state, "NCCL_SOCKET_IFNAME"):
            code = "no-interface"  # the same text appears when the named interface does not exist
        ranks = ranks_of(job, hit.whos)
        if code == "mixed-nccl" and len(job.state.versions) > 1:
            lines = lines + [line for one in job.state.versions.values() for line in one.lines[:1]]
        if code == "duplicate-gpu":
            ranks = sorted(set(ranks) | shared_gpus(job))
        found.append(finding(code, ranks, lines, detail_of(hit), severity))
    if not found and len(job.state.versions) > 1 and failing(job.state) and not deaths(job):
        return versions_differ(job, "fail")
    return found


def shared_gpus(job):
    by_gpu = defaultdict(set)
    for rank, member in job.rows.items():
        by_gpu[member.process[0], member.bus].add(rank)
    return set().union(*(ranks for (_, bus), ranks in by_gpu.items() if bus and len(ranks) > 1))


def versions_differ(job, severity):
    lines = [line for hit in job.state.versions.values() for line in hit.lines[:2]]
    ranks = ranks_of(job, [who for hit in job.state.versions.values() for who in hit.whos])
    return [finding("mixed-nccl", ranks, lines, " and ".join(sorted(job.state.versions)), severity)]


def setting(state, name):
    """The value of a variable as NCCL printed it, the first that is not 0."""
    for value in state.environment.get(name, {}):
        if value not in ("0", ""):
            return value
    return ""


def failing(state):
    bad = any(e.code not in (0, -15, 143) for e in state.exits)
    return bad or bool(state.works or state.gone or errors(state) or "watchdog" in state.hits)


def stuck_groups(state):
    return [group for group in state.groups.values() if group.begun and not group.complete]


def network(job):
    """Hosts that do not reach each other, and network cards that give up."""
    hit = job.state.hits.get("unreachable-peer") or job.state.hits.get("rendezvous-failed")
    stuck = stuck_groups(job.state)
    tried = job.state.hits.get("retrying")
    if not hit and tried and any(rank_of(job, who) in group.begun for who in tried.whos for group in stuck):
        hit = tried
    if job.nodes > 1 and (hit or stuck and len(stuck) == len(job.state.groups)):
        if found := wrong_interfaces(job):
            return found
    if hit:
        code = "rendezvous-failed" if hit is job.state.hits.get("rendezvous-failed") else "unreachable-peer"
        return [of_hit(job, code, hit)]
    return network_cards(job)


def wrong_interfaces(job):
    by_host = {}
    for process, seen in job.state.processes.items():
        if seen.interface:
            by_host.setdefault(job.alias.get(process, process)[0], seen.interface)
    loops = [host for host, (name, address) in by_host.items() if name == "lo" or address.startswith(("127.", "::1"))]
    addresses = Counter(address for _, address in by_host.values())
    bad = [host for host, (name, address) in by_host.items()
           if addresses[address] > 1 or VIRTUAL.match(name) or address.startswith(("169.254.", "fe80"))]
    code = "loopback-interface" if len(loops) > 1 or loops and len(by_host) == 1 else "wrong-interface"
    hosts = loops if code == "loopback-interface" else bad + loops
    if not hosts:
        return []
    ranks = [rank for rank, member in job.rows.items() if member.process[0] in hosts]
    lines = setting_lines(job.state, "NCCL_SOCKET_IFNAME")[:2]
    for key in ("unreachable-peer", "retrying"):
        lines += job.state.hits[key].lines[:2] if key in job.state.hits else []
    lines += [group.line for group in stuck_groups(job.state) if group.line][:1]
    used = ", ".join(f"{host} uses {by_host[host][0]} {by_host[host][1]}" for host in hosts[:8])
    return [finding(code, ranks, lines, used)]


def network_cards(job):
    roce = any("RoCE" in seen.rdma for seen in job.state.processes.values()) or setting(job.state, "NCCL_IB_GID_INDEX")
    worked = any(n > 5 for n in job.state.progress.values()) or any(work.seq > 5 for work in job.state.works)
    if hit := job.state.hits.get("ib-completion"):
        status = {int(match[1]) for text in hit.details for match in [STATUS.search(text)] if match}
        access = any("local access violation" in text or "LOC_LEN" in text for text in hit.details)
        code = "roce-gid" if roce and status & {12, 13} and not worked else "ib-error"
        code = "ib-mtu" if status & {1, 4} or access else code
        lines = hit.lines + setting_lines(job.state, "NCCL_IB_GID_INDEX")[:1]
        return [finding(code, ranks_of(job, hit.whos), lines, detail_of(hit))]
    for code in ("roce-gid", "ib-error"):
        if hit := job.state.hits.get(code):
            return [of_hit(job, code if roce else "ib-error", hit)]
    return []


HANGS = ("desync", "rank0-busy", "straggler", "p2p-hang", "net-hang", "timeout-unknown")


def hangs(job):
    """What the pattern of the timeouts says, process group by process group; the most certain answer leads."""
    found = []
    if hit := job.state.hits.get("desync"):
        found.append(of_hit(job, "desync", hit))
    by_group = defaultdict(list)
    for work in job.state.works:
        by_group[work.group].append(work)
    for group, works in by_group.items():
        found.append(judge(job, group, works))
    named_late = job.state.hits.get("straggler")
    if named_late and not any(one.code == "desync" for one in found):
        found.append(of_hit(job, "straggler", named_late))
    found += unmatched_messages(job.state)
    if not found:
        found = gloo_timeouts(job)
    return sorted(found, key=lambda one: HANGS.index(one.code))[:1]


def judge(job, group, works):
    """One process group: who is stuck in which collective, and who is not there at all?"""
    stuck = {}
    for work in works:
        rank = rank_of(job, work.who)
        rank = work.local if rank is None else rank
        if rank not in stuck or work.seq < stuck[rank].seq:
            stuck[rank] = work
    lines = [work.line for work in stuck.values()]
    calls = {rank: (work.op, work.size) for rank, work in stuck.items()}
    first = min(work.seq for work in stuck.values())
    # Groups of one number may be several (HSDP): then one local rank stands for several ranks, and nothing compares.
    apart = len({work.local for work in stuck.values()}) < len(stuck)
    point = any(op.strip("_") in POINTWISE for op, _ in calls.values())
    together = {rank: call for rank, call in calls.items() if stuck[rank].seq == first}
    if not apart and len(together) > 1 and mismatch(together):
        return finding("desync", minority(together), lines, f"collective {first}: {spoken(together)}")
    behind = {rank for rank, work in stuck.items() if work.seq == first}
    if not apart and not point and len(behind) < len(stuck):
        return finding("straggler", behind, lines, f"{in_words(behind)} at collective {first}, the others beyond it")
    others = {local: last for (name, local), last in job.state.progress.items() if name == group and local not in stuck}
    behind = {local for local, last in others.items() if last < first}
    if not apart and behind:
        said = f"{in_words(behind)} did not enqueue collective {first} ({spoken(together)})"
        return finding("straggler", behind, lines, said)
    joined = set(others) - behind
    world = group in ("", "0") or "default_pg" in group
    silent = set(range(job.size)) - set(stuck) - joined if world else set()
    if silent:
        return silent_ranks(job, silent, first, together, lines)
    return same_everywhere(job, stuck, first, together, lines)


def silent_ranks(job, silent, first, calls, lines):
    present = silent & (set(job.rows) | set(job.state.dumps) | job.state.ranks)
    said = f"collective {first}: {spoken(calls)} wait"
    if not present or len(silent) > len(present):
        return finding("timeout-unknown", calls, lines, f"{said}; {in_words(silent)} not shown in this log")
    small = all(size is None or size[0] <= 1024 for _, size in calls.values())
    bars = [line for who, line in job.state.bars.values() if rank_of(job, who) in (0, None)]
    if silent == {0} and first <= 20 and (small or bars):
        last = f"; its last progress: {split_tag(bars[-1].text)[2].strip()[:80]}" if bars else ""
        return finding("rank0-busy", [0], lines + bars[-1:], f"{said}{last}")
    return finding("straggler", silent, lines, f"{said}; {in_words(silent)} did not report")


def same_everywhere(job, stuck, first, calls, lines):
    kinds = {link.transport.split("/")[0] for link in job.links.values()}
    if job.nodes > 1 and (not kinds or "NET" in kinds):
        code = "net-hang" if kinds else "timeout-unknown"
    else:
        code = "p2p-hang" if "P2P" in kinds else "timeout-unknown"
    lines = lines + [link.line for link in job.links.values() if link.transport.startswith(("P2P", "NET"))][:2]
    return finding(code, stuck, lines, f"collective {first}: {spoken(calls)}")


def minority(calls):
    """The ranks that differ from most, or all of them."""
    groups = defaultdict(list)
    for rank, call in calls.items():
        groups[call].append(rank)
    largest = max(groups.values(), key=len)
    return [rank for rank in calls if rank not in largest] if 2 * len(largest) > len(calls) else list(calls)


def spoken(calls):
    groups = defaultdict(list)
    for rank, call in sorted(calls.items()):
        groups[call].append(rank)
    return ", ".join(f"{in_words(ranks)} in {op}" + (f" ({size[0]} to {size[1]} elements)" if size else "")
                     for (op, size), ranks in groups.items())


def in_words(ranks):
    """{0, 1, 2, 5} -> 'ranks 0-2, 5'"""
    runs = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {text}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"ranks {text}"


def unmatched_messages(state):
    """Point-to-point calls of the dumps: a send that waits although its receiver posted fewer receives."""
    posted, waiting = Counter(), {}
    for name, _, entries in state.dumps.values():
        if not entries or entries[0].get("record_id", 0) != 0:
            return []  # the recorder's ring went round: counts mean nothing
        for entry in entries:
            call = re.search(r"(send|recv) (\d+)(?:->|<-)(\d+)", str(entry.get("profiling_name")))
            if call and entry.get("is_p2p"):
                ends = (call[2], call[3]) if call[1] == "send" else (call[3], call[2])
                key = (str(entry.get("process_group")), *map(int, ends))
                posted[call[1], key] += 1
                if not completed(entry):
                    waiting.setdefault((call[1], key), Line(name, 1, f"{call[0]} {frame(entry)}"))
    found = []
    for (kind, key), line in waiting.items():
        other, peer = ("recv", key[2]) if kind == "send" else ("send", key[1])
        if peer in state.dumps and posted[other, key] < posted[kind, key]:
            text = f"{kind} {posted[kind, key]} of rank {key[1]} to rank {key[2]} waits; "
            found.append(finding("straggler", [peer], [line], f"{text}rank {peer} posted {posted[other, key]} {other}"))
    return found


def gloo_timeouts(job):
    """On CPU there is no watchdog: each waiting rank raises, with its call in the traceback."""
    late = [one for one in job.state.gone if "Timed out waiting" in one.error]
    calls = {rank_of(job, one.who): (one.op or "a collective", None) for one in late}
    calls.pop(None, None)
    lines = [one.line for one in late]
    if len({op for op, _ in calls.values()}) > 1:
        return [finding("desync", minority(calls), lines, spoken(calls))]
    silent = set(range(job.size)) - set(calls)
    if calls and silent:
        return [finding("straggler", silent, lines, f"{spoken(calls)} waited; {in_words(silent)} did not report")]
    return [finding("timeout-unknown", calls, lines, spoken(calls))] if late else []


def unexplained(job):
    """Something failed and nothing above says why."""
    exits = [e for e in merged_exits(job.state) if e.code not in (0, -15, 143)]
    ranks = sorted({rank for e in exits if (rank := exit_rank(job, e)) is not None})
    echo = ranks_of(job, [one.who for one in job.state.gone])
    alone = [e for e in exits if e.root and (exit_rank(job, e) not in echo or not job.state.gone)]
    if alone and alone[0].code > 0:
        text = f"exit code {alone[0].code}; its traceback is not shown in this log"
        return [finding("rank-raised", {exit_rank(job, e) for e in alone} - {None}, [alone[0].line], text)]
    if not failing(job.state):
        stuck = stuck_groups(job.state)
        if not stuck or len(stuck) < len(job.state.groups):
            return []
        if "peer-lost" not in job.state.hits:  # the log may simply end here
            return [started(job, stuck, "note")]
    if len(job.state.versions) > 1:
        return versions_differ(job, "fail")
    if job.state.gone or "peer-lost" in job.state.hits:
        hit = job.state.hits.get("peer-lost")
        nccl = [one for one in job.state.gone if "NCCL" in one.error or "nccl" in one.error]
        unknown = job.state.hits.get("nccl-warning")
        if nccl and not hit:
            lines = (unknown.lines if unknown else []) + [one.line for one in nccl]
            return [finding("nccl-error", ranks_of(job, [one.who for one in nccl]), lines,
                            detail_of(unknown) if unknown else nccl[0].error[:200])]
        lines = (hit.lines if hit else []) + [one.line for one in job.state.gone]
        return [finding("peer-lost", echo, lines, job.state.gone[0].error[:200] if job.state.gone else detail_of(hit))]
    if stuck_groups(job.state):
        return [started(job, stuck_groups(job.state), "fail")]
    if any(e.code < 0 for e in exits):
        return [finding("rank-crashed", ranks, [e.line for e in exits], f"exit code {exits[0].code}")]
    if hit := job.state.hits.get("watchdog"):
        return [of_hit(job, "timeout-unknown", hit, "")]
    return []


def started(job, stuck, severity):
    group = max(stuck, key=lambda one: one.size)
    missing = set(range(group.size)) - set(group.members)
    text = f"Init START on {len(group.members)} of {group.size} ranks, Init COMPLETE not shown in this log"
    text += f"; {in_words(missing)} never appeared" if missing else ""
    return finding("init-incomplete", missing, [group.line], text, severity)


def slowness(job):
    """Paths that work but are not the best the machine has. Only what is printed counts: absence proves nothing."""
    found = []
    local = {pair: link for pair, link in job.links.items()
             if link.hosts[0] == link.hosts[1] is not None or link.transport.startswith("SHM")}
    remote = {pair: link for pair, link in job.links.items() if pair not in local and link.transport.startswith("NET")}
    found += slow_p2p(job, {p: k for p, k in local.items() if k.transport.startswith("SHM")})
    over_net = {p: k for p, k in local.items() if k.transport.startswith("NET")} | same_machine(job, remote)
    if over_net:
        code = "shm-disabled-by-user" if setting(job.state, "NCCL_SHM_DISABLE") else "same-host-over-net"
        found.append(link_finding(code, over_net, setting_lines(job.state, "NCCL_SHM_DISABLE")))
    remote = {pair: link for pair, link in remote.items() if pair not in over_net}
    staged = {pair: link for pair, link in remote.items() if re.fullmatch(r"NET/(?:IB|[^/]*RDMA)[^/]*", link.transport)}
    if staged:
        off = job.state.hits.get("gdr-off", Hit())
        why = "NCCL_NET_GDR_LEVEL=LOC forbids GPUDirect" if setting(job.state, "NCCL_NET_GDR_LEVEL") == "LOC" else None
        lines = off.lines + setting_lines(job.state, "NCCL_NET_GDR_LEVEL")
        found.append(link_finding("ib-without-gdr", staged, lines, why))
    return found + slow_tcp(job, remote)


def slow_p2p(job, shm):
    off = job.state.hits.get("p2p-off")
    together = max(Counter(member.process[0] for member in job.rows.values()).values(), default=0)
    level = setting(job.state, "NCCL_P2P_LEVEL")
    by_user = setting(job.state, "NCCL_P2P_DISABLE") or level in ("LOC", "NVL", "PIX", "PXB")
    if by_user and (shm or not job.links and together > 1):
        lines = setting_lines(job.state, "NCCL_P2P_DISABLE") + setting_lines(job.state, "NCCL_P2P_LEVEL")
        return [link_finding("p2p-disabled-by-user", shm, lines)]
    if "p2p-unavailable" in job.state.hits or not (shm or off):
        return []
    why = "the driver reports that they cannot reach each other; expected on GeForce" if off else None
    off = off or Hit()
    return [link_finding("p2p-unavailable", shm, off.lines[:3], why, ranks_of(job, off.whos))]


def setting_lines(state, name):
    values = state.environment.get(name, {})
    return [line for value, hit in values.items() if value not in ("0", "") for line in hit.lines[:2]]


def link_finding(code, links, lines, why=None, ranks=()):
    pairs = sorted(links)
    text = ", ".join(f"{a} to {b} {links[a, b].transport}" for a, b in pairs[:4])
    text += f" ... {len(pairs)} links" if len(pairs) > 4 else ""
    ranks = {rank for pair in pairs for rank in pair} | set(ranks)
    return finding(code, ranks, lines + [links[pair].line for pair in pairs], text, why=why)


def same_machine(job, remote):
    """Containers of one machine have different names but may share its address."""
    address = {}
    for process, seen in job.state.processes.items():
        if seen.interface and not VIRTUAL.match(seen.interface[0]) and seen.interface[0] != "lo":
            address[job.alias.get(process, process)[0]] = seen.interface[1]
    return {pair: link for pair, link in remote.items()
            if None not in link.hosts and address.get(link.hosts[0], "") == address.get(link.hosts[1], "?")}


def slow_tcp(job, remote):
    sockets = {pair: link for pair, link in remote.items() if link.transport == "NET/Socket"}
    chosen = any(seen.network == "Socket" for seen in job.state.processes.values())
    uses_tcp = sockets or job.nodes > 1 and not remote and chosen
    listed = any(seen.rdma for seen in job.state.processes.values())
    lines = setting_lines(job.state, "NCCL_IB_DISABLE") + setting_lines(job.state, "NCCL_NET")
    if uses_tcp and (listed or setting(job.state, "NCCL_IB_DISABLE")):
        return [link_finding("ib-unused", sockets, lines)] if lines or sockets else []
    return []


def remarks(job, causes):
    found = []
    for code in ("spliced-log", "ib-port", "nccl-warning", "stopped"):
        if code == "stopped" and causes or code == "nccl-warning" and causes:
            continue
        if hit := job.state.hits.get(code):
            found.append(of_hit(job, code, hit, "" if code == "spliced-log" else None))
    if (hit := job.state.hits.get("cumem-note")) and not any(one.code == "cumem-host" for one in causes):
        found.append(of_hit(job, "cumem-host", hit, "NCCL falls back to /dev/shm", "note")._replace(
            why="often a container without NUMA permissions", fix="nothing, if /dev/shm is large enough"))
    if hit := job.state.hits.get("net-ignored"):
        found.append(of_hit(job, "net-mismatch", hit, severity="note"))
    if len(job.state.versions) > 1 and not any(one.code == "mixed-nccl" for one in causes):
        found += versions_differ(job, "note")
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Report
# ---------------------------------------------------------------------------------------------------------------------
def verdict_of(found):
    severities = {one.severity for one in found}
    return "fail" if "fail" in severities else "slow" if "slow" in severities else "ok"


def as_json(job, found, after):
    hosts = {}
    for host, processes in job.hosts.items():
        known = [job.state.processes[process].interface for process in processes if process in job.state.processes]
        interface = next(filter(None, known), None)
        hosts[host] = {
            "ranks": sorted(rank for rank, member in job.rows.items() if member.process[0] == host),
            "interface": interface[0] if interface else None, "address": interface[1] if interface else None,
            "gpus": [{"rank": rank, "cuda": int(m.cuda) if m.cuda else None, "bus": m.bus}
                     for rank, m in job.rows.items() if m.process[0] == host]}
    return {
        "verdict": verdict_of(found), "nccl": sorted(job.state.versions), "hosts": hosts, "ranks": job.size,
        "links": [{"from": a, "to": b, "transport": link.transport, "channels": link.channels}
                  for (a, b), link in sorted(job.links.items())],
        "findings": [{"code": one.code, "severity": one.severity, "cause": f"{one.what}. {one.why}".rstrip(". "),
                      "fix": one.fix, "ranks": one.ranks,
                      "lines": [{"file": line.file, "line": line.number} for line in one.lines]} for one in found],
        "consequences": dict(after)}


def report(job, found, after):
    out = [f"verdict: {verdict_of(found)}" + (f" - {found[0].what}" if found and found[0].severity != "note" else "")]
    out.append(f"NCCL {', '.join(sorted(job.state.versions)) or 'version not shown in this log'}; {job.size} ranks, "
               f"{len(job.hosts)} hosts, {len(job.state.files)} files, {sum(job.state.lengths.values())} lines")
    out += whereabouts(job) + matrix(job)
    for number, one in enumerate(found, 1):
        out.append(f"\n{number}. [{one.severity}] {one.code}" + (f", {in_words(one.ranks)}" if one.ranks else ""))
        out.append(f"   what      {one.what}")
        out += [f"   evidence  {line.file}:{line.number}  {line.text.strip()[:140]}" for line in one.lines]
        out += [f"   why       {one.why}"] * bool(one.why) + [f"   do        {one.fix}"]
    if not found:
        out.append("\nnothing wrong or slow is shown in this log")
    if after and verdict_of(found) == "fail":
        out.append("\nconsequences, not causes: " + ", ".join(f"{n} x {label}" for label, n in sorted(after.items())))
    return "\n".join(out + absences(job))


def whereabouts(job):
    if not job.rows:
        return []
    out = ["", "  rank  host                  GPU  bus     pid      interface"]
    for rank, member in sorted(job.rows.items())[:64]:
        seen = job.state.processes.get(member.process)
        interface = " ".join(seen.interface) if seen and seen.interface else ""
        host, pid = member.process
        out.append(f"  {rank:4}  {host:20}  {member.cuda or '?':>3}  {member.bus or '?':6}  {pid:7}  {interface}")
    if len(job.rows) > 64:
        out.append(f"  ... and {len(job.rows) - 64} more")
    if job.guessed:
        out.append("  no communicator spans all ranks: these numbers follow hosts and GPUs")
    return out


def matrix(job):
    """Links from row to column. Above 8 ranks a matrix does not fit a line: counts per transport instead."""
    if not job.links:
        return []
    ranks = sorted({rank for pair in job.links for rank in pair})
    if len(ranks) > 8:
        kinds = Counter(link.transport for link in job.links.values())
        return ["", "  links: " + ", ".join(f"{n} x {kind}" for kind, n in kinds.most_common())]
    cells = {pair: f"{link.transport} x{link.channels}" for pair, link in job.links.items()}
    width = max(map(len, cells.values())) + 2
    out = ["", "  from\\to " + "".join(f"{rank:<{width}}" for rank in ranks)]
    out += [f"  {a:7} " + "".join(f"{cells.get((a, b), '.'):<{width}}" for b in ranks) for a in ranks]
    return out


def absences(job):
    missing = []
    if job.state.processes and not job.links:
        missing.append("links (NCCL 2.22 and later prints them at the first collective, and only those it uses)")
    late = sorted({rank for group in job.state.groups.values() for rank in set(group.members) - group.complete})
    if late and not any(group.complete for group in job.state.groups.values()):
        missing.append("Init COMPLETE")
    if job.rows and len(job.rows) < job.size:
        missing.append(f"lines of {in_words(set(range(job.size)) - set(job.rows))}")
    if job.state.processes and job.nodes > 1 and not any("NET" in link.transport for link in job.links.values()):
        missing.append("links between hosts, hence whether they use GPUDirect")
    return ["\nnot shown in this log: " + "; ".join(missing)] if missing else []


def explain_codes():
    return "\n".join(f"{name:22}{code.severity:6}{code.what}; {code.why}\n{'':28}do: {code.fix}"
                     for name, code in CODES.items())


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help="log or flight-recorder dump; - for standard input")
    parser.add_argument("--json", action="store_true", help="print the diagnosis as JSON")
    parser.add_argument("--codes", action="store_true", help="list every finding with its reason and remedy")
    options = parser.parse_args(arguments)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    if options.codes:
        print(explain_codes())
        return 0
    if not options.files:
        parser.error("give at least one FILE, or - for standard input")
    state = State()
    try:
        for name in options.files:
            if name == "-":
                read(state, sys.stdin.buffer, "-")
            else:
                with open(name, "rb") as stream:
                    read(state, stream, name)
    except (OSError, Refused) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not state.recognised:
        print("error: nothing of NCCL, PyTorch or torchrun in this input; was NCCL_DEBUG=INFO set?", file=sys.stderr)
        return 2
    job, found, after = diagnose(state)
    result = as_json(job, found, after)
    print(json.dumps(result, indent=2) if options.json else report(job, found, after))
    return 1 if verdict_of(found) == "fail" else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # `| head` closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
