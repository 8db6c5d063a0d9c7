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

Four kinds of line are read: NCCL's own (2.14 to 2.31), PyTorch's watchdog, Python tracebacks, the launcher's summary of
how processes ended; flight-recorder dumps (pickle or JSON, one per rank) are joined to them. Blame goes in this order:
a process that raised or was killed, the first warning NCCL printed, the network, the pattern of the timeouts. What
follows from the first cause is counted and not listed. Standard library only: copy this one file to any machine.

    RULES         what can be found: the words it is known by, why it happens, what to do
    read          bytes -> lines worth reading -> Log (what was seen, of bounded size)
    locate        Log -> Job (which rank is which process, and what joins two ranks)
    diagnose      Job -> findings, the first cause first

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
BLOCK = 1 << 19  # bytes read at once
LINE = 1 << 16  # bytes looked at in one line
DUMP = 1 << 26  # bytes of the largest flight-recorder dump
EVIDENCE = 6  # lines kept per finding
DULL = "dull"  # a line that is known, and says nothing whatever its numbers are
FORCED = 150  # lines after "Traceback" that are read even if nothing in them looks interesting

# ── what can be found ────────────────────────────────────────────────────────────────────────────────────────────────
# `warn` is searched in NCCL's warnings, `text` in the lines of PyTorch, Python, the launcher and the kernel; in both, the
# first rule that matches has the line. NCCL's words are those of 2.14 to 2.31, hence several spellings.
RULES = r"""
cumem-host  fail  host memory through cuMem does not work
  why   the driver, the container or differing settings prevent it
  do    NCCL_CUMEM_HOST_ENABLE=0 on every rank, or a newer driver
  warn  shared memory segment .*\(size 0\)|shm\.cc\S* .*(?:Cuda failure 217|peer access is not supp)
shm-too-small  fail  /dev/shm is full
  why   ranks of one host exchange data through /dev/shm; a container gets 64 MB by default
  do    docker run --shm-size=1g or --ipc=host; Kubernetes: an emptyDir with medium Memory mounted on /dev/shm
  warn  failed to extend /dev/shm|(?:creating|attaching to) shared memory segment
  text  DataLoader worker.*[Bb]us error|insufficient shared memory|/dev/shm.*No space left
duplicate-gpu  fail  several ranks use the same GPU
  why   the device was hard-coded or chosen after the first collective
  do    torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before init_process_group, or its device_id=
  warn  Duplicate GPU detected|Multiple [Rr]anks (?:are|detected) using the same GPU
mixed-nccl  fail  ranks run different NCCL versions
  why   every rank must load the same build
  do    the same torch wheel or container on every host; look for a second libnccl.so.2 in LD_LIBRARY_PATH or LD_PRELOAD
  warn  Mismatched NCCL version|Message truncated : received|is neither AF_INET
no-interface  fail  no usable network interface
  why   NCCL_SOCKET_IFNAME (GLOO_SOCKET_IFNAME on CPUs) matches none, or leaves only ones without an address
  do    unset NCCL_SOCKET_IFNAME, or name an interface that `ip -br addr` shows as UP with an address on every host
  warn  no (?:socket |IP |usable )?interface found|No IP interface found
  text  Unable to find address for: |Unable to find interface for:
p2p-unavailable  slow  GPUs of one host exchange data through host memory
  why   direct access between these GPUs is not available
  do    nothing to repair on GeForce cards; fewer and larger all-reduces help: gradient accumulation, a larger local batch.
        Where peer access is expected, see `nvidia-smi topo -p2p r` and the IOMMU/ACS settings
  warn  P2P is disabled between NVLINK|Cuda failure 217|peer access is not supported
imex  fail  multi-node NVLink does not work
  why   the IMEX service or its channel is not available to this process
  do    start nvidia-imex on all nodes and give the container /dev/nvidia-caps-imex-channels; stop-gap NCCL_MNNVL_ENABLE=0
  warn  MNNVL .*(?:not working|failed)|IMEX
nvls-fabric  fail  the NVSwitch fabric refused
  why   Fabric Manager is down, differs from the driver, or was restarted under running GPUs
  do    check that nvidia-fabricmanager runs and has the driver's version; reset the GPUs or reboot after a restart of it;
        stop-gap NCCL_NVLS_ENABLE=0
  warn  NVLink SHARP|NVLS\) Multicast|nvls\.cc\S* (?:\(\w+\) )?(?:Cuda|CUDA)|system not yet initialized
  text  system not yet initialized
memlock  fail  memory could not be locked for the network card
  why   the limit on locked memory is too low in the job
  do    ulimit -l unlimited inside the job (limits.conf, LimitMEMLOCK of the daemon, docker --ulimit memlock=-1)
  warn  ibv_\w+.*Cannot allocate memory
net-mismatch  fail  hosts see different numbers of network cards
  why   channels to the missing cards have no peer and wait
  do    make the same NICs visible everywhere (NCCL_IB_HCA); do not set NCCL_IGNORE_NET_MISMATCH
  warn  Detected mixed local \w+ device counts
out-of-memory  fail  memory ran out
  why   the other ranks were left waiting for this one
  do    reduce --micro-batch or the largest resolution bucket, or use --activations checkpoint;
        PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against fragmentation; if NCCL itself found no room, leave it
        1-2 GB, make fewer process groups or lower NCCL_BUFFSIZE
  warn  out of memory|Failed to (?:CUDA|Cuda) (?:host )?[cm]alloc
  text  CUDA out of memory|OutOfMemoryError|CUDA error: out of memory|can't allocate memory: you
rank-killed  fail  a process got SIGKILL
  why   nobody inside the job does that: the kernel's or the container's memory limit, or the scheduler
  do    look at dmesg and the cgroup's memory.events on that host (host memory, not GPU memory); use fewer --workers, less
        pinned memory, or ask the scheduler for more memory
  text  DataLoader worker.*signal: Killed|oom[-_ ]kill|OOMKilled|Killed process \d+|: Out Of Memory
rank-crashed  fail  a process died in native code
  why   a signal such as SIGSEGV, SIGBUS or SIGABRT ended it
  do    SIGBUS in a container: enlarge /dev/shm; otherwise run with PYTHONFAULTHANDLER=1 and look at the last stack
rank-raised  fail  a rank stopped with an error of its own
  why   the other ranks were left waiting for it
  do    fix that error; decorate main with torch.distributed.elastic's @record if the traceback is missing
gpu-fault  fail  the GPU or its driver reported a fault
  why   ECC, Xid and launch failures end every later call on that GPU
  do    look for Xid in dmesg, run dcgmi diag -r 3, and take the GPU out of the job until it is reset or replaced
  warn  uncorrectable|unspecified launch failure|over nvlink|hardware error
  text  uncorrectable ECC|NVRM: Xid|fallen off the bus|CUDA error: unspecified launch failure
invalid-device  fail  a rank asked for a GPU that is not there
  why   more ranks than visible GPUs, or RANK used for LOCAL_RANK
  do    --nproc_per_node at most the number of GPUs in CUDA_VISIBLE_DEVICES; take the device from LOCAL_RANK
  text  invalid device ordinal
cuda-error  fail  a CUDA kernel failed on one rank
  why   a wrong index or address in a kernel, seen at the next call
  do    run again with CUDA_LAUNCH_BLOCKING=1 to see the true line
  text  CUDA error: (?!out of)|device-side assert triggered|(?:CUBLAS|CUDNN)_STATUS_(?!SUCCESS)
library-conflict  fail  two copies of libnccl are mixed
  why   torch was built for another NCCL than the one loaded
  do    remove the second libnccl.so.2 from LD_LIBRARY_PATH and LD_PRELOAD; torch.cuda.nccl.version() shows the loaded one
  text  undefined symbol: nccl|libnccl\S* .*undefined symbol
port-in-use  fail  the rendezvous port is taken
  why   another job or a leftover process listens on it
  do    torchrun --standalone, another --master_port, or end the leftover process
  text  EADDRINUSE|Address already in use
loopback-interface  fail  several hosts talk over the loopback interface
  why   each host then only reaches itself; an exclusion such as ^docker0 replaces NCCL's own exclusions, and lo is left
  do    NCCL_SOCKET_IFNAME=^docker0,lo, or name the interface that reaches the other hosts
wrong-interface  fail  NCCL picked an interface that does not reach the other host
  why   bridges and virtual interfaces exist on every host with local, often equal, addresses
  do    unset NCCL_SOCKET_IFNAME, or name the NIC that reaches the other node
ib-mtu  fail  the network card rejected a packet
  why   the MTU differs between nodes (NCCL 2.20 stopped adjusting), or memory was not registered
  do    set the same MTU on all ports (ibv_devinfo), then try NCCL_NET_GDR_LEVEL=LOC once
ib-port  note  a network port reported an event
  why   ports that flap show up as timeouts later
  do    ibstat and the switch's counters, if it repeats
  warn  Got async (?:fatal )?event
roce-gid  fail  RoCE cannot deliver the first packets
  why   the GID index does not fit the network
  do    unset NCCL_IB_GID_INDEX (NCCL 2.21 and later choose), or set the index of the RoCE v2 address (show_gids)
  warn  ibv_modify_qp failed|Call to ibv_modify_qp
peer-lost  fail  a peer closed its connection
  why   it ended first; its own last lines are not shown in this log
  do    read the log of the other ranks: the first that ended has the cause
  warn  [Cc]onnection closed|Connection reset|Broken pipe|remote process|wrong type \d|Accept failed
unreachable-peer  fail  a TCP connection to another rank cannot be opened
  why   NCCL uses ephemeral ports: a rendezvous that works proves only one port
  do    open all TCP between the nodes, or pin net.ipv4.ip_local_port_range and open that range; check the chosen
        interface, and that no hostname resolves to localhost
  warn  [Cc]onnect (?:to|returned)\b.*(?:fail|return|refused|route)|No route to host|timed out|Connection refused|Network is unreachable|exceeded (?:error )?(?:retr|timeouts)
ib-error  fail  the network card gave up on a peer
  why   the peer, its port or a switch stopped answering
  do    look at the peer's own log first; then ibstat, cables and switch counters of the named device
  warn  \bibv_\w+ failed|NET/IB
rendezvous-failed  fail  the ranks did not find each other
  why   MASTER_ADDR or MASTER_PORT is wrong or closed, or one node never started
  do    check MASTER_ADDR from every node, that the port is open, and that --nnodes nodes were started
  text  client socket has (?:timed out after|failed to connect to any)|RendezvousTimeoutError|RendezvousConnectionError
desync  fail  ranks called different collectives
  why   they took different paths through the program
  do    the same calls in the same order on every rank: equal steps per rank (drop_last or a padded sampler), no collective
        inside an if on rank or data; or agree on stopping first
  text  Detected mismatch between collectives
rank0-busy  fail  rank 0 was still at work while the others waited
  why   long work on one rank before the first collectives
  do    do it beforehand (tools/encode.py) or share it over the ranks; raise timeout= in init_process_group; or wait with a
        gloo barrier
straggler  fail  some ranks did not come to a collective
  why   the others waited for them until the limit
  do    look at those ranks first: last lines, py-spy dump, data loading, uneven steps per rank
p2p-hang  fail  every rank waits in the same collective
  why   nobody is late: data sent from GPU to GPU does not arrive; the PCIe root redirects it (ACS, IOMMU) or the driver
        promises peer access it cannot keep
  do    confirm with one run of NCCL_P2P_DISABLE=1; then switch off ACS and IOMMU translation (BIOS, setpci, iommu=pt) and
        update the driver
net-hang  fail  every rank waits in the same collective
  why   nobody is late: data between the hosts does not arrive
  do    test the links with nccl-tests between pairs of hosts; confirm with one run of NCCL_IB_DISABLE=1; compare NICs, MTU,
        GID and switch counters
timeout-unknown  fail  a collective timed out
  why   this log does not show which rank was late
  do    read the logs of all ranks together, and record the flight: TORCH_FR_BUFFER_SIZE=2000 and
        TORCH_NCCL_TRACE_BUFFER_SIZE=2000 with their dump files
init-incomplete  fail  communicators began and did not complete
  why   the ranks could not all connect, or some never came
  do    compare the interfaces above between hosts; start the missing ranks; tools/doctor.py tests interfaces and ports
  text  the first \w+ all-reduce of \d+ ranks failed
nccl-error  fail  NCCL reported an error
  why   the cause is not shown in this log
  do    run again with NCCL_DEBUG=INFO and NCCL_DEBUG_FILE=/tmp/nccl.%h.%p.log
p2p-disabled-by-user  slow  direct access between GPUs is switched off by your own variable
  why   data goes through host memory instead
  do    unset NCCL_P2P_DISABLE and NCCL_P2P_LEVEL (also in /etc/nccl.conf and ~/.nccl.conf)
shm-disabled-by-user  slow  NCCL_SHM_DISABLE sends data within a host over the network
  why   shared memory is faster than any NIC here
  do    unset NCCL_SHM_DISABLE; if /dev/shm was too small, enlarge it
same-host-over-net  slow  ranks of one host talk over the network
  why   they do not share GPUs and /dev/shm, as in separate containers
  do    one container per host, or share both: --ipc=host (or a common /dev/shm), all GPUs visible, equal NCCL_HOSTID
ib-without-gdr  slow  data between hosts is staged through host memory
  why   the links are RDMA but without GPUDirect (no /GDRDMA)
  do    modprobe nvidia-peermem on every node, or the open kernel driver with DMA-BUF; then check ACS and NCCL_NET_GDR_LEVEL
ib-unused  slow  the hosts talk over TCP although RDMA could serve
  why   RDMA devices are listed or were switched off
  do    unset NCCL_IB_DISABLE and NCCL_NET; check NCCL_IB_HCA and that libibverbs and /dev/infiniband are in the container
spliced-log  note  lines are cut and glued together
  why   several ranks wrote into one pipe, each buffered in blocks
  do    NCCL_DEBUG_FILE=/tmp/nccl.%h.%p.log, or /dev/stderr, which is written line by line
nccl-warning  note  NCCL printed a warning this program does not know
  do    read the line
stopped  note  the job was stopped from outside
  why   a signal to torchrun, or the scheduler's limit
  do    nothing, if intended; --save-every keeps the work
  text  Received \d+ death signal|SignalException|CANCELLED AT|DUE TO TIME LIMIT|KeyboardInterrupt
dump-refused  note  a flight-recorder dump was not read
  why   it is damaged, or asks for more than plain containers; loading it in full could run foreign code
  do    take the other ranks' dumps; write this one again
"""


class Rule(NamedTuple):
    severity: str
    what: str
    why: str
    do: str
    warn: str
    text: str


def parse_rules(table):
    rules, code, key = {}, "", ""
    for line in table.strip().splitlines():
        word, rest = line.split(maxsplit=1)
        if line.startswith("      "):
            rules[code][key] += " " + line.strip()  # the sentence goes on
        elif line.startswith(" "):
            key, rules[code][word] = word, rest
        else:
            code, (severity, what) = word, rest.split(maxsplit=1)
            rules[code] = dict.fromkeys(Rule._fields, "") | {"severity": severity, "what": what}
    return {code: Rule(**fields) for code, fields in rules.items()}


RULES = parse_rules(RULES)
COMPLETION = re.compile(r"Got completion (?:from|with)")  # NET/IB: its status decides between three rules
WARN = [("ib-error", COMPLETION)] + [(code, re.compile(rule.warn)) for code, rule in RULES.items() if rule.warn]
TEXT = [(code, re.compile(rule.text)) for code, rule in RULES.items() if rule.text]
DIED = ("out-of-memory", "rank-killed", "gpu-fault", "invalid-device", "library-conflict", "port-in-use", "cuda-error")
SAID = """cumem-host shm-too-small duplicate-gpu mixed-nccl no-interface p2p-unavailable imex nvls-fabric memlock
          net-mismatch""".split()
HANGS = ("desync", "rank0-busy", "straggler", "p2p-hang", "net-hang", "timeout-unknown")  # the most certain first

FOLLOWS = {  # counted as consequences unless they are the cause
    "unreachable-peer": "failed connection",
    "ib-error": "failed network card request",
    "rendezvous-failed": "failed rendezvous",
    "init-incomplete": "failed first collective",
    "stopped": "stop signal",
}

# ── how the other lines look ─────────────────────────────────────────────────────────────────────────────────────────
EVENTS = {  # INFO lines that matter, by their first word, because there are so many INFO lines
    "P2P": ("p2p-off", "P2P is disabled between connected GPUs"),
    "Could": ("p2p-off", "Could not enable P2P between dev"),
    "cuMem": ("cumem-note", "cuMem host allocations do not appear"),
    "GPU": ("gdr-off", "GPU Direct RDMA Disabled"),
    "Detected": ("net-ignored", "Ignoring due to NCCL_IGNORE_NET_MISMATCH"),
    "[Service": ("closed", "Connection closed"),
    **dict.fromkeys(("Call", "socketPollConnect:", "socketStartConnect:"), ("retrying", "retrying")),
    **dict.fromkeys(("ncclOsSocketPollConnect:", "ncclOsSocketStartConnect:"), ("retrying", "retrying")),
}
# Errors that a rank raises because another one is gone or late: never a cause.
ECHO = re.compile(
    r"DistBackendError|DistStoreError|DistNetworkError|NCCL [Ee]rror|NCCL [Cc]ommunicator|nccl\w+Error|gloo/"
    r"|Connection (?:closed|reset) by (?:remote )?peer|Broken pipe|Timed out waiting|Socket Timeout|monitoredBarrier"
    r"|ProcessGroupNCCL|ChildFailedError|Process(?:Raised|Exited)Exception|CalledProcessError|wait timeout"
    r"|died without a word|the ranks lost each other"
)
CONSEQUENCES = (  # only counted
    ("closed connection", re.compile(r"Connection (?:closed|reset) by|Service thread\] (?:Connection cl|Accept f)")),
    ("SIGTERM by the launcher", re.compile(r"Sending process \d+ closing signal")),
    ("watchdog message", re.compile(r"Some NCCL operations|entire process down|watchdog (?:thread|got)|dump signal")),
    ("watchdog message", re.compile(r"[Hh]eartbeat monitor")),
)
CORE = re.compile(r" NCCL (INFO|WARN|TRACE|CALL|VERSION|ERROR) ?")
HEAD = re.compile(r"([\w.-]+):(\d+):(\d+)(?: \[-?\d+\])?(?: [\d.]+)?(?: ([\w./+-]+:\d+(?: \([^()]*\))?))?$")
TAG = re.compile(  # what torchrun --tee, PyTorch, mpirun, srun -l, compose, Ray, kubectl and CRI write in front
    r"\s*(?:\[(?P<default>default\d{1,9})\]:?|\[rank ?(?P<rank>\d{1,9})\]:?"
    r"|\[\d{1,9},(?P<mpi>\d{1,9})\](?:<std\w+>)?:|(?P<srun>\d{1,5}): "
    r"|(?P<svc>[\w.-]+) +\| |\((?P<ray>[^()]{3,160})\) |\[(?P<pod>[\w./-]{3,120})\] "
    r"|\[?\d{4}-\d\d-\d\d[T ][\d:.,+]+Z?\]?(?: std(?:out|err) [FP])? )"
)
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
COMM = re.compile(
    r"comm (0x[0-9a-f]+) rank (\d{1,9}) n[rR]anks (\d{1,9})"
    r"(?: cudaDev (\d{1,9}))?(?: nvmlDev (\d{1,9}))?(?: busId ([0-9a-f]+))?"
)
NODES = re.compile(r"nNodes (\d{1,9}) localRanks \d{1,9}")
COMM_ID = re.compile(r"commId (0x[0-9a-f]+)")
SPLIT = re.compile(r"parent (0x[0-9a-f]+).* color (-?\d{1,9})")
LINK = re.compile(
    r"Channel (\d{1,9})(?:/\d{1,9})? : (\d{1,9})\[(\w+)\] -> (\d{1,9})\[(\w+)\](?: \[(send|receive)\])? via "
    r"((?:P2P|SHM)/(?:CUMEM|IPC|MNNVL|direct pointer|direct|CE|indirect/\w+\[\w+\])(?:/\w+)*|NET/[^/]+/\d{1,9}[\w/()-]*)"
    r"(?: comm \S+.*)?\s*$"
)
RING = re.compile(r"Channel \d{1,9}/(\d{1,9}) :((?: +\d{1,9})+)\s*$")
INTERFACE = re.compile(r"Bootstrap ?: Using (?:\[\d{1,9}\])?([\w.@-]+):([^<\s]+)<")
ENVIRONMENT = re.compile(r"(NCCL_\w+) set (?:by environment )?to (.*?)\.?\s*$")
VERSION = re.compile(r"NCCL version (\d{1,9}\.\d{1,9}(?:\.\d{1,9})?)")
STATUS = re.compile(r"(?:status=(?:\w+\()?|with error )(\d{1,9})")
WATCHDOG = re.compile(
    r"\[Rank (\d{1,15})\]\s+Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d{1,15}), OpType=(\w+)"
    r"(?:, NumelIn=(\d{1,15}), NumelOut=(\d{1,15}))?(?:, TensorShape=\[([\d, ]*)\])?"
)
GROUP = re.compile(r"\[PG (?:ID )?(\d{1,9})(?: PG GUID ([^\s(\]]+))?(?: ?\([^)]*\))? Rank (\d{1,9})\]")
ENQUEUED = re.compile(r"last enqueued (?:NCCL )?work: (-?\d{1,9}).*last completed (?:NCCL )?work: -?\d{1,9}", re.I)
FRAME = re.compile(r'\s+File "(.+?)", line (\d{1,9}), in (\S+)')
RAISED = re.compile(r" ?((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?:: (.*))?$")
OWN_ERROR = re.compile(r"error: (?:rank (\d{1,9}), )?")  # the one line of this project's scripts
LAST_LINE = re.compile(r" ?(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): ")
FAILED = re.compile(r"failed \(exitcode: (-?\d{1,9})\) local_rank: (\d{1,9}) \(pid: (\d{1,9})\)")
SUMMARY = re.compile(r"\b(host|rank|exitcode)\s+: (-?[\w.-]+)(?: \((?:local_rank|pid): (\d{1,9})\))?")
FORCED_END = re.compile(r"process (\d+) via (?:Signals\.)?SIGTERM, forcefully|forcefully.*?process (\d+)")
SIGNALLED = re.compile(  # mpirun, srun, torch.multiprocessing
    r"rank (\d{1,9}) .*exited on signal (\d{1,9})|task (\d{1,9}): (Killed|Out Of Memory|Segmentation fault|Bus error)"
    r"|process (\d{1,9}) terminated with signal SIG(\w+)"
)
SIGNALS = {"Killed": 9, "Out Of Memory": 9, "KILL": 9, "Segmentation fault": 11, "SEGV": 11, "Bus error": 7, "ABRT": 6}
ABSENT = re.compile(  # PyTorch itself names the ranks that did not come
    r"Ranks? ([\d, ]+) failed to pass monitoredBarrier|\[([\d, ]+)\] finished collective #\d{1,9}, but didn't join"
    r"|ranks \[([\d, ]+)\] are the lagging ranks|retr\w+ ncclUniqueId from \[(\d{1,9})\]"
)
VIRTUAL = re.compile(r"docker|br-|veth|virbr|cni|flannel|cali|tun|tap|wg|tailscale|vmnet|vboxnet|cilium|podman|lxc")
POINTWISE = ("SEND", "RECV", "COALESCED", "SCATTER", "GATHER", "ALLTOALL", "ALLTOALL_BASE")  # may differ between ranks
KEYS = [key.encode() for key in (  # only lines with one of these are looked at
    "NCCL ", "Traceback", "rror", "exitcode", "local_rank", "host      :", "Root Cause", "Failures:", "atchdog", "[PG ",
    "emory", "ignal", "illed", "onitoredBarrier", "collective", "lagging", "%|", "Xid", "Address already", ": task ",
    "client socket", "This is usually", "Disable NVLS", "distributed",
)]  # fmt: skip
TOLD = tuple(word.encode() for word in (  # how the INFO messages begin that say something
    "Channel", "comm ", "ncclComm", "[Rank", "Bootstrap", "NET/IB", "Using network", "NCCL", *EVENTS
))  # fmt: skip
STAMP = re.compile(rb"\[?\d{4}-\d\d-\d\d[T ][\d:.,+]+Z?\]? ")
DIGITS = bytes.maketrans(b"123456789", b"0" * 9)


# ── what is kept while reading ───────────────────────────────────────────────────────────────────────────────────────
class Table(dict):
    """A dict that stops growing at LIMIT keys."""

    def __setitem__(self, key, value):
        if key in self or len(self) < LIMIT:
            super().__setitem__(key, value)

    def setdefault(self, key, value):
        if key not in self:
            self[key] = value
        return self.get(key, value)


class Who(NamedTuple):
    """How a line names its rank: some carry the rank of the job, others a process or only the launcher's tag."""

    rank: int | None = None
    process: tuple | None = None  # host, pid
    tag: str = ""


class Seen(NamedTuple):
    """A line that says something, about whom, and what."""

    file: str
    line: int
    raw: str
    who: Who = Who()
    text: str = ""


@dataclass
class Process:
    lines: int = 0
    interface: tuple | None = None  # name, address
    rdma: set = field(default_factory=set)  # IB, RoCE
    network: str = ""
    communicators: Table = field(default_factory=Table)  # pointer -> key of the group
    building: Table = field(default_factory=Table)  # thread -> key of the group it is in the middle of


class Member(NamedTuple):
    process: tuple
    cuda: str | None
    nvml: str | None
    bus: str | None


@dataclass
class Group:
    """A communicator, seen from all its ranks."""

    size: int
    seen: Seen
    members: dict = field(default_factory=dict)  # rank in the group -> Member
    complete: set = field(default_factory=set)
    nodes: int = 0
    rings: Counter = field(default_factory=Counter)  # order of ranks -> channels listed
    channels: int = 0


@dataclass
class Stuck:
    """A collective that a rank waits in: what its watchdog says, or its flight recorder."""

    seen: Seen
    local: int  # rank in the group
    seq: int
    call: tuple  # operation, (elements in, elements out) or None where not printed
    group: str = ""


@dataclass
class Exit:
    """How a process ended, as the launcher saw it."""

    code: int
    seen: Seen
    pid: str
    rank: int | None = None
    local: int | None = None
    host: str = ""
    root: bool = False  # the first failure that was seen


class Call(NamedTuple):
    """An entry of a flight recorder."""

    call: tuple  # as in Stuck
    done: bool
    text: str


@dataclass
class Log:
    lengths: dict = field(default_factory=dict)  # file -> lines, in the order of reading
    recognised: bool = False
    watch: int = 0  # so many of the next lines are read whatever they hold
    heads: Table = field(default_factory=Table)  # text before " NCCL " -> what it says
    announced: int = 0  # so many times a communicator has said something about itself
    repeated: Table = field(default_factory=Table)  # line -> `announced` when it was read, or None if that is no matter
    dull: set = field(default_factory=set)  # lines that say nothing, with every digit a zero
    seen: Table = field(default_factory=Table)  # a rule's code, an event, a version, a setting -> list of Seen
    count: Counter = field(default_factory=Counter)  # the same keys -> lines, kept or not
    after: Counter = field(default_factory=Counter)  # consequences
    processes: Table = field(default_factory=Table)  # (host, pid) -> Process
    groups: Table = field(default_factory=Table)
    links: Table = field(default_factory=Table)
    stuck: Table = field(default_factory=Table)  # (rank, number, operation) -> Stuck
    enqueued: Table = field(default_factory=Table)  # (group, rank in it) -> number of its last collective
    exits: Table = field(default_factory=Table)
    forced: Table = field(default_factory=Table)  # pids that torchrun itself killed
    tags: Table = field(default_factory=Table)  # launcher's tag -> processes that wrote behind it
    ranks: Table = field(default_factory=Table)  # ranks that PyTorch's lines carry
    bars: Table = field(default_factory=Table)  # tag -> last progress bar
    traces: Table = field(default_factory=Table)  # (file, tag) -> the traceback it is in
    summaries: Table = field(default_factory=Table)
    last_error: Table = field(default_factory=Table)
    dumps: Table = field(default_factory=Table)  # rank -> file
    recorded: Table = field(default_factory=Table)  # group -> number -> rank -> Call
    recorded_ranks: Table = field(default_factory=Table)  # group -> ranks
    messages: Table = field(default_factory=Table)  # (send or recv, group, sender, receiver) -> Calls
    wrapped: bool = False  # a recorder's ring went round: counts of messages mean nothing

    def see(self, key, seen, text="", who=None):
        """Keep two lines of each rank; the rest is only counted. The last one replaces the second."""
        seen = seen._replace(text=text, who=who or seen.who)
        kept = self.seen.setdefault(key, [])
        self.count[key] += key in self.seen
        again = [i for i in range(len(kept) - 1, max(-1, len(kept) - 65), -1) if kept[i].who == seen.who]
        if len(again) > 1:
            kept[again[0]] = seen
        elif len(kept) < LIMIT:
            kept.append(seen)

    def of(self, *keys):
        return [seen for key in keys for seen in self.seen.get(key, ())]

    def versions(self):
        return sorted(key[1] for key in self.seen if key[0] == "version")

    def in_the_middle(self):
        """Of a traceback, a summary or a repeated warning: what the next line means depends on those before."""
        return bool(self.traces or self.summaries or self.last_error)

    def setting(self, *names):
        """The lines in which NCCL printed these variables, if they are set to anything but 0."""
        keys = [key for name in names for key in self.seen if key[:2] == ("setting", name) and key[2] not in ("0", "")]
        return self.of(*keys)

    def ended_badly(self):
        return [end for end in self.exits.values() if end.code not in (0, -15, 143)]


# ── reading: bytes -> lines worth reading -> Log ─────────────────────────────────────────────────────────────────────
def read(log, stream, name):
    """Fold one file into the log. Lines end at a newline; a progress bar redraws its line with a carriage return."""
    start = stream.read(4096)
    if start[:1] == b"\x80" and start[1:2] in b"\2\3\4\5" or start[:1] == b"{" and b'"entries"' in start:
        start += stream.read(DUMP)
        log.lengths[name] = 1
        if read_dump(log, start, name):
            return
    number, rest, block = 1, start, start
    while block:
        block = stream.read(BLOCK)
        text, mark, tail = (rest + block).rpartition(b"\n") if block else (rest, rest[:1], b"")
        if not mark:
            text, mark, tail = tail.rpartition(b"\r")
        if not mark:  # longer than a block: the beginning of the line is kept, the rest is passed over
            rest = tail[:LINE]
            continue
        read_block(log, text.replace(b"\r\n", b"\n"), name, number, cut=not block)
        number += text.count(b"\n") + (mark != b"\r")
        rest = tail
    log.lengths[name] = number - 1


def read_block(log, block, name, number, cut):
    """Most lines hold none of the keys, and most keys are in no line of a block: look for them in that order."""
    keys = [key for key in KEYS if key in block]
    redraws, last, bar = b"\r" in block, block.count(b"\n") + number, None
    for n, whole in enumerate(block.split(b"\n") if keys or log.watch else (), number):
        for raw in whole.split(b"\r") if redraws else (whole,):
            shape, watched = b"", log.watch > 0
            log.watch -= watched
            if (at := raw.find(b" NCCL INFO ")) >= 0 and raw.find(b"NCCL ", at + 11) < 0:
                # Of no interest, or read before: every communicator prints the same lines again. A link over the network
                # may mean another peer then, so it counts as read only until a communicator says more about itself.
                stamp = STAMP.match(raw)
                once = raw[stamp.end() :] if stamp else raw
                state = log.announced if b" via NET/" in raw else None
                if log.repeated.get(once, -1) == state or not raw.startswith(TOLD, at + 11):
                    log.recognised = True
                    continue
                if len(raw) < 300:
                    log.repeated[once] = state
            elif not watched or not log.in_the_middle():
                for key in keys:
                    if key in raw:
                        break
                else:
                    continue
                if (shape := shape_of(raw)) in log.dull and not log.in_the_middle():
                    bar = (raw, n) if b"%|" in raw else bar
                    continue
            if bar and b"%|" in raw:
                bar = None
            told = feed(log, raw[:LINE].decode("utf-8", "replace"), name, n, cut and n == last)
            if shape and not told and not log.in_the_middle() and len(raw) < 300:
                if len(log.dull) >= LIMIT:
                    log.dull.clear()
                log.dull.add(shape)
    if bar:  # of one that is redrawn, the last state counts
        feed(log, bar[0][:LINE].decode("utf-8", "replace"), name, bar[1], cut and bar[1] == last)


def shape_of(raw):
    """A line with every digit a zero, which no rule minds: a line that a training loop prints each step is read once.
    The rank in `[rank3]:` stays, because the ranks are counted."""
    at = raw.find(b"]") + 1 if raw.startswith(b"[rank") else 0
    return raw[:at] + raw[at:].translate(DIGITS)


def feed(log, text, name, number, cut):
    """False if the line says nothing, whatever its numbers are."""
    if not text.isprintable():
        text = ANSI.sub("", text)
    seen = Seen(name, number, text[:400])
    return " NCCL " in text and nccl_line(log, text, seen, cut) or torch_line(log, text, seen)


# ── NCCL's own lines ─────────────────────────────────────────────────────────────────────────────────────────────────
def nccl_line(log, text, seen, cut):
    """Take every NCCL message out of a line: a spliced one holds several. False if there is none."""
    found, begin = [], 0
    for core in CORE.finditer(text):
        if head := parse_head(log, text[max(core.start() - 200, begin) : core.start()]):
            found.append((head, core))
            begin = core.end()
    if len(found) > 1:
        log.see("spliced-log", seen)
    for (process, thread, source, tag), core in found:
        last = core is found[-1][1]
        end = len(text) if last else text.find(":".join(process), core.end())
        message = text[core.end() : end if end >= 0 else found[-1][1].start()]
        owner = log.processes.setdefault(process, Process())
        owner.lines += 1
        log.recognised = True
        if tag:
            log.tags.setdefault(tag, set()).add(process)
        here = seen._replace(who=Who(process=process, tag=tag))
        if core[1] == "WARN":
            warning(log, f"{source or ''} {message}", here)
        elif core[1] == "INFO":
            information(log, owner, thread, message, here, cut or not last)
    return bool(found)


def parse_head(log, before):
    """`tags host:pid:thread [device] file:line` -> (host, pid), thread, file:line, tag. The host ends at its first dot."""
    if before not in log.heads:
        match = HEAD.search(before)
        if not match:
            return None
        host, pid, thread, source = match.groups()
        if len(log.heads) >= LIMIT:  # time stamps make every head a new one
            log.heads.clear()
        log.heads[before] = (host.split(".")[0], pid), thread, source, split_tag(before[: match.start()])[0]
    return log.heads[before]


def warning(log, text, seen):
    """A WARN line, or the text of one that PyTorch repeats under `Last error:`. False if no rule knows it."""
    code = next((code for code, pattern in WARN if pattern.search(text)), None)
    log.after["closed connection"] += code == "peer-lost"
    if code or seen.who.process:
        log.see(code or "nccl-warning", seen, text.strip()[:300])
    return code is not None


def information(log, owner, thread, message, seen, cut):
    word = message.split(" ", 1)[0]
    if word == "Channel":
        channel(log, owner, thread, message, seen, cut)
    elif " rank " in message and (match := COMM.search(message)):
        communicator(log, owner, thread, message, match, seen)
    elif match := INTERFACE.match(message):
        owner.interface = match.groups()
    elif word == "NET/IB":
        owner.rdma.update(re.findall(r":\d+/(IB|RoCE)", message))
    elif message.startswith("Using network ") and not cut:
        owner.network = message[14:].strip()
    elif match := VERSION.match(message):
        log.see(("version", match[1]), seen)
    elif match := ENVIRONMENT.match(message):
        log.see(("setting", *match.groups()), seen)
    elif word in EVENTS and EVENTS[word][1] in message:
        log.see(EVENTS[word][0], seen, message.strip()[:200])


def communicator(log, owner, thread, message, match, seen):
    """Init START, nRanks and Init COMPLETE: who is which rank of which communicator."""
    pointer, rank, size, cuda, nvml, bus = match.groups()
    rank, size, nodes, process = int(rank), int(size), NODES.search(message), seen.who.process
    log.announced += 1
    if rank >= size or size > RANKS or not (nodes or "Init " in message):
        return
    key = group_key(log, owner, message, pointer, rank, size, process)
    group = log.groups.setdefault(key, Group(size, seen))
    if cuda is not None or rank not in group.members:
        group.members.setdefault(rank, Member(process, cuda, nvml, bus))
    owner.communicators[pointer] = owner.building[thread] = key
    if nodes:
        group.nodes = int(nodes[1])
    if "Init COMPLETE" in message:
        group.complete.add(rank)
        owner.building.pop(thread, None)


def group_key(log, owner, message, pointer, rank, size, process):
    """The same value on every rank of a communicator, from what its version prints."""
    if match := COMM_ID.search(message):
        return "id", match[1], size
    if split := SPLIT.search(message):
        return "split", owner.communicators.get(split[1], split[1]), split[2], size
    known = owner.communicators.get(pointer)
    if known in log.groups and log.groups[known].size == size:
        return known
    # Before 2.18.3 nothing tells two communicators of one size apart: take the first whose place is free.
    for copy in range(1000):
        group = log.groups.get(("size", size, copy))
        if group is None or rank not in group.members or group.members[rank].process == process:
            break
    return "size", size, copy


def channel(log, owner, thread, message, seen, cut):
    """`Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM` is a link, `Channel 00/24 : 0 1 2 3` the order of a ring."""
    building = owner.building.get(thread)
    if cut:
        return
    if link := LINK.match(message):
        number, a, card_a, b, card_b, direction, transport = link.groups()
        over_network = transport.startswith("NET/")
        if over_network != (direction is not None):
            return
        if over_network:
            transport = "/".join(transport.split("/")[:2]) + "/GDRDMA" * ("/GDRDMA" in transport)
        key = seen.who.process, building, (int(a), card_a), (int(b), card_b), direction == "receive", transport
        log.links.setdefault(key, (set(), seen))[0].add(int(number))
    elif " -> " not in message and (ring := RING.match(message)) and (group := log.groups.get(building)):
        order = tuple(map(int, ring[2].split()))
        if len(order) == group.size and (len(group.rings) < 64 or order in group.rings):
            group.rings[order] += 1
            group.channels = int(ring[1])


# ── the lines of PyTorch, Python and the launcher ────────────────────────────────────────────────────────────────────
def split_tag(text):
    """`[default1]:[rank3]: text` -> tag, rank, text. Time stamps are taken off too, but are no part of the tag."""
    tags, rank, at = [], None, 0
    while (match := TAG.match(text, at)) and match.end() > at:
        at = match.end()
        if kind := match.lastgroup:
            tags.append(match[kind])
            number = re.search(r"\d+$" if kind == "rank" else r"rank=(\d+)", match[kind])
            rank = int(number[number.lastindex or 0]) if number else rank
    return "/".join(tags), rank, text[at:]


def torch_line(log, text, seen):
    """False if nothing is in it. True also for a rank in a tag that `shape_of` does not keep."""
    tag, rank, rest = split_tag(text)
    seen, stream = Seen(*seen[:3], Who(rank=rank, tag=tag)), (seen.file, tag)
    if rank is not None:
        log.ranks[rank] = None
    if "Traceback (most recent call last):" in rest:
        log.recognised, log.watch = True, FORCED
        log.traces[stream] = ["", ""]
    elif stream in log.traces and traceback_line(log, stream, rest, seen):
        pass
    elif "%|" in text:
        log.bars[tag] = seen
        return bool(tag)
    elif stream in log.last_error and warning(log, rest, seen):
        del log.last_error[stream]
    elif "Last error:" in text:  # PyTorch repeats NCCL's warning in one of the next two lines
        log.last_error[stream], log.watch = 2, max(log.watch, 2)
    elif text.startswith(("This is usually caused by", "Disable NVLS")):  # NCCL's only warning of three lines
        if log.of("nvls-fabric") and log.of("nvls-fabric")[-1].line == seen.line - 1:
            log.see("nvls-fabric", seen, who=Who(tag=f"line {seen.line}"))
    elif told := absent_line(log, text, seen) or watchdog_line(log, text, seen) or exit_line(log, text, stream, seen):
        log.recognised = True
        return told is not DULL
    elif rank is not None and LAST_LINE.match(rest):  # PyTorch's hook writes `[rank1]:`; the beginning is cut off
        log.traces[stream] = ["", ""]
        traceback_line(log, stream, rest, seen)
    else:
        if stream in log.last_error:
            log.last_error[stream] -= 1
            if not log.last_error[stream]:
                del log.last_error[stream]
        log.recognised |= any(word in text for word in ("torch/distributed", "torch.distributed", "ProcessGroup"))
        version = version_in(log, text, seen, Who(rank=0))  # alone in its line it is rank 0's, up to 2.21
        told = count_consequence(log, text) or error_line(log, rest, seen)
        return version or told or rank is not None and not text.startswith("[rank")
    return True


def version_in(log, text, seen, who):
    """PyTorch's errors end in the NCCL version of their rank."""
    if match := VERSION.search(text):
        log.recognised = True
        log.see(("version", match[1]), seen, who=seen.who if seen.who.rank is not None else who)
    return match is not None


def count_consequence(log, text):
    label = next((label for label, pattern in CONSEQUENCES if pattern.search(text)), None)
    if label:
        log.after[label] += 1
    return label is not None


def error_line(log, text, seen):
    own = OWN_ERROR.match(text)
    if own and own[1]:
        seen = seen._replace(who=Who(rank=int(own[1])))
    code = next((code for code, pattern in TEXT if pattern.search(text)), None)
    if code:
        log.recognised = True
        log.see(code, seen, text.strip()[:300])
    elif own:
        log.see("echo" if ECHO.search(text) else "own-error", seen, text[7:300])
    return bool(code or own)


def traceback_line(log, stream, rest, seen):
    """A frame, or the error that ends the traceback; false for lines between."""
    trace = log.traces[stream]  # the user's own frame, the function of torch.distributed
    if frame := FRAME.match(rest):
        path, number, function = frame.groups()
        if path.endswith("distributed_c10d.py"):
            trace[1] = function
        elif not any(part in path for part in ("site-packages", "/lib/python", "/torch/")):
            trace[0] = f" ({os.path.basename(path)}:{number})"
        return True
    if rest.startswith("    "):  # the source of a frame, and the ^^^^ below it
        return True
    match = None if rest.startswith("  ") else RAISED.match(rest)
    if not match or match[1] == "Original":
        return False
    del log.traces[stream]
    text = rest.strip()[:300]
    version_in(log, text, seen, seen.who)
    if absent_line(log, text, seen) or error_line(log, text, seen):
        pass
    elif ECHO.search(text):
        if "ChildFailed" not in text:
            log.see("echo", seen, text)
        if "Timed out waiting" in text and seen.who.rank is not None:  # gloo has no watchdog: each waiting rank raises
            rank, call = seen.who.rank, (trace[1] or "a collective", None)
            log.stuck.setdefault((rank, 0, "gloo"), Stuck(seen, rank, 0, call))
        count_consequence(log, text)
    elif match[1] not in ("SystemExit", "KeyboardInterrupt"):
        log.see("raised", seen, text + trace[0])
    return True


def absent_line(log, text, seen):
    match = ABSENT.search(text)
    for number in re.findall(r"\d{1,9}", "".join(filter(None, match.groups()))) if match else ():
        log.see("straggler", seen, text.strip()[:200], Who(rank=int(number)))
    return bool(match)


def watchdog_line(log, text, seen):
    if match := WATCHDOG.search(text):
        local, seq, op, n_in, n_out, shape = match.groups()
        size = (int(n_in), int(n_out)) if n_in else None
        if shape is not None:
            size = (product(re.findall(r"\d{1,15}", shape)),) * 2
        if seen.who.rank is None:
            seen = seen._replace(who=Who(rank=int(local), tag=seen.who.tag))
        log.stuck.setdefault((seen.who.rank, int(seq), op), Stuck(seen, int(local), int(seq), (op, size)))
        return True
    if not (match := GROUP.search(text)):
        return False
    group, local = match[2] or match[1], int(match[3])
    if status := ENQUEUED.search(text):
        log.enqueued[group, local] = int(status[1])
        rank = local if seen.who.rank is None else seen.who.rank
        for stuck in list(log.stuck.values())[-64:]:  # the line belongs to the time-out just before it
            if stuck.seen.who.rank == rank and not stuck.group:
                stuck.group = group
        log.see("watchdog", seen, who=Who(rank=rank))
    return count_consequence(log, text) or bool(status) or DULL


def product(sizes):
    total = 1
    for size in sizes:
        total *= int(size)
    return total


def exit_line(log, text, stream, seen):
    """How processes ended: torchrun's line at once, its summary at the end, mpirun, srun, torch.multiprocessing."""
    if match := FAILED.search(text):
        ended(log, seen, match[1], match[3], local=match[2], root=True)
    elif "Root Cause" in text or "Failures:" in text:
        log.summaries[stream] = {"root": "Root Cause" in text}
    elif match := FORCED_END.search(text):
        log.forced[match[1] or match[2]] = None
    elif match := SIGNALLED.search(text):
        rank, number, task, how, spawned, name = match.groups()
        if signal := int(number or SIGNALS.get(how or name, 0)):
            ended(log, seen, -signal, "", rank or task or spawned, root=True)
    elif (match := SUMMARY.search(text)) and stream in log.summaries:
        entry, (key, value, number) = log.summaries[stream], match.groups()
        entry[key], entry[key + " number"] = value, number
        if key == "exitcode" and re.fullmatch(r"\d{1,9} -?\d{1,9}", f"{entry.get('rank')} {value}"):
            local, host = entry["rank number"] or 0, entry.get("host", "")
            ended(log, seen, value, number or "", entry["rank"], local, host, entry["root"])
    else:
        return False
    return True


def ended(log, seen, code, pid, rank=None, local=None, host="", root=False):
    """torchrun prints an exit twice: at once with the pid, and in its summary with the rank."""
    end = log.exits.setdefault((pid, int(code)) if pid else seen, Exit(int(code), seen, pid))
    end.rank = end.rank if rank is None else int(rank)
    end.local = end.local if local is None else int(local)
    end.host, end.root = host if host not in ("", "localhost") else end.host, end.root or root


# ── the flight recorder: one dump per rank ───────────────────────────────────────────────────────────────────────────
class Refused(Exception):
    """A pickle that asks for more than plain containers."""


class PlainUnpickler(pickle.Unpickler):
    """Dumps hold dicts, lists, tuples, strings and numbers; a pickle that asks for more could run code."""

    def find_class(self, module, name):
        raise Refused(f"asks for {module}.{name}; only plain containers are read")

    def persistent_load(self, pid):
        raise Refused("asks for an object outside the file; only plain containers are read")


def read_dump(log, data, name):
    """False if it is a log after all. The rank is the last number in the file's name."""
    numbers = re.findall(r"\d{1,9}", os.path.basename(name).removesuffix(".json").removesuffix(".pkl"))
    rank = int(numbers[-1]) if numbers else len(log.dumps)
    try:
        raw = json.loads(data) if data[:1] == b"{" else PlainUnpickler(io.BytesIO(data)).load()
        listed = {str(group): str(config.get("ranks", "")) for group, config in (raw.get("pg_config") or {}).items()}
        entries = [recorded_call(entry) for entry in raw["entries"][-LIMIT:]]
    except Exception as error:  # a foreign file can be wrong in any way
        if b" NCCL " in data or b"Traceback" in data:
            return False
        reason = str(error) if isinstance(error, Refused) else f"not a flight-recorder dump ({type(error).__name__})"
        log.see("dump-refused", Seen(name, 1, ""), f"{name}: {reason}")
        return True
    for group, seq, message, call in entries:
        if message:
            log.messages.setdefault((message[0], group, *message[1:]), []).append(call)
        else:
            log.recorded.setdefault(group, Table()).setdefault(seq, {}).setdefault(rank, call)
            log.recorded_ranks[group] = set(map(int, re.findall(r"\d{1,9}", listed.get(group, "")))) or {rank}
    log.wrapped |= bool(raw["entries"] and raw["entries"][0].get("record_id"))
    if version := re.match(r"[\d.]+", str(raw.get("nccl_version") or raw.get("comm_lib_version"))):
        log.see(("version", version[0]), Seen(name, 1, "", Who(rank=rank)))
    log.dumps[rank], log.recognised = name, True
    return True


def recorded_call(entry):
    """-> group, number, (send or recv, sender, receiver) if it is a message, Call"""
    group = entry.get("process_group", entry.get("pg_id", ""))
    group = str(group[0] if isinstance(group, list | tuple) and group else group)
    name, state = str(entry.get("profiling_name", "?")), str(entry.get("state", ""))
    done = state == "completed" or bool(entry.get("time_discovered_completed_ns"))
    if name.startswith("gloo"):  # gloo's states are never updated; it retires what is done
        done = bool(entry.get("retired"))
    sides = [entry.get("input_sizes") or [], entry.get("output_sizes") or []]
    size = tuple(sum(product(shape) for shape in side if isinstance(shape, list | tuple)) for side in sides)
    own = [frame for frame in entry.get("frames") or [] if "/torch/" not in str(frame.get("filename"))]
    place = f" at {os.path.basename(str(own[0].get('filename')))}:{own[0].get('line')}" if own else ""
    operation, message = name.split(":")[-1], None
    if entry.get("is_p2p") and (match := re.search(r"(send|recv) (\d{1,9})(?:->|<-)(\d{1,9})", name)):
        mine, other = int(match[2]), int(match[3])
        message = (match[1], mine, other) if match[1] == "send" else (match[1], other, mine)
    call = Call((operation.upper(), size), done, f"{operation} {state}{place}")
    return group, int(entry.get("collective_seq_id") or 0), message, call


def recorded_hangs(log):
    """The first collective of each process group in which dumps disagree or wait, as if the watchdogs had spoken."""
    for group, by_seq in log.recorded.items():
        last = dict.fromkeys(log.recorded_ranks[group] & {*log.dumps}, 0)
        last |= {rank: seq for seq in sorted(by_seq) for rank in by_seq[seq]}
        for seq, calls in sorted(by_seq.items()):
            waiting = [rank for rank in calls if not calls[rank].done]
            late = [rank for rank in last if last[rank] < seq]
            hangs_here = waiting and (late or len(waiting) == len(calls))
            if hangs_here or mismatch({rank: call.call for rank, call in calls.items()}):
                log.enqueued.update({("recorder " + group, rank): last[rank] for rank in late})
                for rank, call in calls.items():
                    seen = Seen(log.dumps[rank], 1, f"collective {seq}: {call.text}", Who(rank=rank))
                    log.stuck["recorder", group, rank] = Stuck(seen, rank, seq, call.call, "recorder " + group)
                break


def mismatch(calls):
    """Do these ranks' calls, {rank: (operation, size)}, contradict each other?"""
    ops = {op for op, _ in calls.values()}
    sizes = {size[0] for _, size in calls.values() if size}
    return not any(op.strip("_") in POINTWISE for op in ops) and (len(ops) > 1 or len(sizes) > 1)


# ── Log -> Job: which rank is which process, and what joins two ranks ────────────────────────────────────────────────
class Link(NamedTuple):
    transport: str
    channels: int
    hosts: tuple  # of sender and receiver; None where the log does not say
    seen: Seen


@dataclass
class Job:
    log: Log
    alias: dict  # spliced spelling of a process -> its true one
    rows: dict = field(default_factory=dict)  # rank in the job -> Member
    rank_of: dict = field(default_factory=dict)  # process -> rank in the job
    hosts: dict = field(default_factory=dict)  # host -> processes
    interfaces: dict = field(default_factory=dict)  # host -> (name, address)
    size: int = 0
    nodes: int = 0
    guessed: bool = False
    links: dict = field(default_factory=dict)  # (from, to) -> Link

    def true(self, process):
        return self.alias.get(process, process)

    def rank(self, who):
        """The rank behind a line, as far as the log tells."""
        if who.rank is not None:
            return who.rank
        if who.process:
            return self.rank_of.get(self.true(who.process))
        owners = {self.true(process) for process in self.log.tags.get(who.tag, ())}
        if len(owners) == 1:
            return self.rank_of.get(owners.pop())
        # mpirun's and srun's numbers are ranks unless a task holds several; torchrun's default3 is one on a single host.
        number = re.fullmatch(r"(?:.*/)?(default)?(\d{1,9})", who.tag)
        return int(number[2]) if number and not owners and not (number[1] and len(self.hosts) > 1) else None

    def ranks(self, seen):
        return {self.rank(one.who) for one in seen} - {None}

    def rank_at_exit(self, end):
        if end.rank is not None:
            return end.rank
        owners = [rank for process, rank in self.rank_of.items() if process[1] == end.pid]
        return owners[0] if len(owners) == 1 else end.local if len(self.hosts) < 2 else None

    def unfinished(self):
        return [group for group in self.log.groups.values() if not group.complete]

    def failing(self):
        log = self.log
        return bool(log.ended_badly() or log.stuck or log.of("echo", "watchdog") or uncaught(log))


def locate(log):
    job = Job(log, true_names(log))
    for process, kept in log.processes.items():
        host = job.true(process)[0]
        job.hosts.setdefault(host, set()).add(job.true(process))
        if kept.interface:
            job.interfaces.setdefault(host, kept.interface)
    number_ranks(job)
    named = [*log.dumps, *log.ranks, *job.rows, *(stuck.seen.who.rank for stuck in log.stuck.values())]
    named += [end.rank for end in log.exits.values() if end.rank is not None]
    job.size = max([job.size, *(rank + 1 for rank in named if rank < RANKS)])
    job.nodes = max([len(job.hosts), *(group.nodes for group in log.groups.values())])
    connect(job)
    return job


def true_names(log):
    """A cut line glues text to a host name or takes a piece off it: what most lines spell is true."""
    alias, by_pid, weight, spliced = {}, defaultdict(list), Counter(), "spliced-log" in log.seen
    for process, kept in log.processes.items():
        by_pid[process[1]].append(process)
        weight[process[0]] += kept.lines
    for same in by_pid.values():
        same.sort(key=lambda process: -weight[process[0]])
        for i, odd in enumerate(same):
            for true in same[:i]:
                rare = spliced and 3 * weight[odd[0]] < weight[true[0]]
                if rare or odd[0].endswith(true[0]) or true[0].endswith(odd[0]):
                    alias.setdefault(odd, true)
    members = {member.process for group in log.groups.values() for member in group.members.values()}
    hosts = {alias.get(process, process)[0] for process in members}
    if spliced and hosts:  # a piece of a host name is no host: only those with a rank count
        for process in [process for process in log.processes if alias.get(process, process)[0] not in hosts]:
            del log.processes[process]
    return alias


def number_ranks(job):
    """Ranks of the job are those of the largest communicator; where none spans all, host and GPU order is a guess."""
    groups, members = job.log.groups.values(), {}
    if not groups:
        return
    for group in groups:
        for rank, member in group.members.items():
            group.members[rank] = member = member._replace(process=job.true(member.process))
            members.setdefault(member.process, member)
    largest = max(groups, key=lambda group: (group.size, len(group.members)))
    job.size, job.rows = largest.size, dict(sorted(largest.members.items()))
    if len(members) > largest.size:
        job.guessed, hosts = True, list(job.hosts)
        order = sorted(members.values(), key=lambda one: (hosts.index(one.process[0]), int(one.cuda or 0)))
        job.rows = dict(enumerate(order))
    job.rank_of = {member.process: rank for rank, member in job.rows.items()}


def connect(job):
    """Link lines carry ranks of their communicator but not its name: find it, then translate to ranks of the job."""
    found = defaultdict(list)
    for (process, building, a, b, receives, transport), (numbers, seen) in job.log.links.items():
        group = group_of_link(job, job.true(process), building, a, b, receives)
        (sender, host_a), (receiver, host_b) = (rank_in_job(group, job, rank) for rank, _ in (a, b))
        channels = max(len(numbers), announced(group, a[0], b[0]) if group else 0)
        found[sender, receiver].append((Link(transport, channels, (host_a, host_b), seen), numbers))
    for pair, links in found.items():
        # Sender and receiver both print NET links. One side without GPUDirect is enough to be slow.
        order = ("P2P", "SHM", "NET")
        worst = max((k for k, _ in links), key=lambda k: (order.index(k.transport[:3]), "GDRDMA" not in k.transport))
        same = [(link.channels, numbers) for link, numbers in links if link.transport == worst.transport]
        listed = set().union(*(numbers for _, numbers in same))
        job.links[pair] = worst._replace(channels=max([len(listed), *(n for n, _ in same)]))


def group_of_link(job, process, building, a, b, receives):
    if building in job.log.groups:
        return job.log.groups[building]
    own, candidates = (b if receives else a)[0], []
    for group in job.log.groups.values():
        if own in group.members and group.members[own].process == process and max(a[0], b[0]) < group.size:
            # The number in brackets is the bus up to 2.18.1 and the NVML index after it.
            cards = [(group.members[rank], card) for rank, card in (a, b) if rank in group.members]
            fits = all(card in (m.nvml, m.bus) or m.nvml is None and m.bus is None for m, card in cards)
            candidates.append((fits, group.size, len(candidates), group))
    return max(candidates)[3] if candidates else None


def rank_in_job(group, job, rank):
    """(rank in the job, host), as far as they are known."""
    member = group.members.get(rank) if group else None
    if member:
        return job.rank_of.get(member.process, rank), member.process[0]
    known = job.rows.get(rank) if group is None or group.size == job.size else None
    return rank, known.process[0] if known else None


def announced(group, a, b):
    """Channels on a link by the ring headers, which may list only a few of them: 'Channel 00/24 : 0 1 2 3'."""
    listed = sum(group.rings.values())
    through = sum(n for order, n in group.rings.items() if a in order and order[(order.index(a) + 1) % len(order)] == b)
    return round(group.channels * through / listed) if listed else 0


# ── Job -> findings, in the order of blame ───────────────────────────────────────────────────────────────────────────
class Finding(NamedTuple):
    code: str
    severity: str
    what: str
    why: str
    do: str
    ranks: list
    seen: list


def finding(job, code, seen, said=None, ranks=None, **other):
    """The rule `code`, with its evidence; what differs from the rule or from what the lines say is given."""
    rule, lines = RULES[code], {(one.file, one.line): one for one in seen}
    said = next((one.text for one in seen if one.text), "")[:240] if said is None else said
    ranks = sorted(job.ranks(seen) if ranks is None else ranks)
    fields = {"severity": rule.severity, "why": rule.why, "do": rule.do} | other
    return Finding(code, what=": ".join(filter(None, (rule.what, said))), ranks=ranks, seen=[*lines.values()], **fields)


def diagnose(log):
    """The job, all findings, and the consequences, counted."""
    recorded_hangs(log)
    job, after = locate(log), Counter(log.after)
    died, said = deaths(job), warnings(job, after)
    blamed = {rank for one in said for rank in one.ranks}
    repeats = [one for one in died if one.code == "rank-raised" and said and blamed.issuperset(one.ranks)]
    causes = [one for one in died if one not in repeats] + said
    causes = causes or network(job) or hangs(job) or unexplained(job)
    after["error of a waiting rank"] += len(log.of("echo")) + len(repeats)
    after["closed connection"] += log.count["closed"]
    if causes and not any(one.code in HANGS for one in causes):
        after["watchdog timeout"] += len(log.stuck)
    blamed = {seen for one in causes for seen in one.seen}
    for code, label in FOLLOWS.items():
        if causes and not blamed.intersection(log.of(code)):
            after[label] += log.count[code]
    slow = slowness(job)
    if any(one.severity == "fail" for one in causes):  # speed comes second once something has failed
        slow = [one._replace(severity="note") for one in slow]
    return job, causes + slow + remarks(job, causes), +after


def credible(log, seen):
    """An error may be caught and only printed. It ended a process if the launcher says that one ended badly or other ranks
    miss one, if it comes from PyTorch's own hook (`[rank1]:`), which sees uncaught errors only, or if the log soon ends."""
    missed = log.ended_badly() or log.stuck or "echo" in log.seen
    return bool(missed or seen.who.process or seen.who.rank is not None or log.lengths[seen.file] - seen.line < 20)


def uncaught(log):
    """Python errors by text."""
    kept, roots = defaultdict(list), [end.code for end in log.ended_badly() if end.root]
    killed = roots and all(code in (-7, -9, -11, 135, 137, 139) for code in roots)  # then no Python error ended it
    for seen in log.of("raised"):
        if credible(log, seen) and not (killed and seen.who.rank is None):
            kept[seen.text].append(seen)
    for seen in log.of("own-error") if log.ended_badly() else ():
        kept[seen.text].append(seen)
    return kept


def deaths(job):
    """Ranks that ended by themselves or were killed; the launcher's first observed failure leads."""
    log, found = job.log, []
    roots = {job.rank_at_exit(end) for end in log.exits.values() if end.root} - {None}
    for code in DIED:
        if any(credible(log, seen) for seen in log.of(code)):
            found.append(finding(job, code, log.of(code)))
    for end in log.exits.values():
        signal = -end.code if end.code < 0 else end.code - 128 if end.code > 128 else 0
        rank = job.rank_at_exit(end)
        where = f"pid {end.pid}" if rank is None else f"rank {rank}"
        where += f" on {end.host}" if end.host else ""
        if signal == 9 and end.pid not in log.forced and (end.root or not roots):
            found.append(finding(job, "rank-killed", [end.seen], f"{where}, exit code {end.code}", {rank} - {None}))
        elif signal in (4, 7, 8, 11):
            found.append(finding(job, "rank-crashed", [end.seen], f"{where}, signal {signal}", {rank} - {None}))
    for error, seen in uncaught(log).items():
        ranks = job.ranks(seen)
        if not ranks and len(roots) == 1 and not seen[0].who.tag:  # without a tag: the launcher knows whose it is
            ranks = roots
        found.append(finding(job, "rank-raised", seen, error, ranks))
    found.sort(key=lambda one: (not roots.intersection(one.ranks), position(log, one)))
    # Several ranks that ended in one way are one finding, and so are the kernel's line and the launcher's.
    kept = {}
    for one in found:
        key = (one.code, *(one.ranks or [one.what])) if one.code == "rank-raised" else one.code
        if old := kept.get(key):
            what = f"{old.what}; then {one.seen[0].text}" if one.code == "rank-raised" else old.what
            one = old._replace(what=what, ranks=sorted({*old.ranks, *one.ranks}), seen=old.seen + one.seen)
        kept[key] = one
    return list(kept.values())


def position(log, one):
    return list(log.lengths).index(one.seen[0].file), one.seen[0].line


def warnings(job, after):
    """NCCL's warnings that name a cause. Of several from one process the first is the deepest in the call chain."""
    log, found, explained = job.log, [], set()
    for one in sorted(
        (finding(job, code, log.of(code)) for code in SAID if code in log.seen), key=lambda f: position(log, f)
    ):
        code, seen, change = one.code, one.seen, {"severity": "fail"}
        owners = {line.who for line in seen if line.who.process}
        if owners and owners <= explained:
            after["later warning"] += log.count[code]
            continue
        explained |= owners
        if code == "nvls-fabric" and len(job.unfinished()) < len(log.groups) and not job.failing():
            change["severity"] = "slow"  # 2.27 and 2.28 go on without NVLS
        elif (
            code == "mixed-nccl"
            and "is neither" in one.what
            and len(log.versions()) < 2
            and log.setting("NCCL_SOCKET_IFNAME")
        ):
            one = finding(job, "no-interface", seen)  # the same text appears when the named interface does not exist
        elif code == "mixed-nccl" and len(log.versions()) > 1:
            change["seen"] = seen + versions_differ(job, "fail").seen
        elif code == "duplicate-gpu":
            change["ranks"] = sorted({*one.ranks, *sharing_a_gpu(job)})
        found.append(one._replace(**change))
    if not found and len(log.versions()) > 1 and job.failing() and not deaths(job):
        found = [versions_differ(job, "fail")]
    return found


def sharing_a_gpu(job):
    by_gpu = defaultdict(set)
    for rank, member in job.rows.items():
        by_gpu[member.process[0], member.bus].add(rank)
    return {rank for (_, bus), ranks in by_gpu.items() if bus and len(ranks) > 1 for rank in ranks}


def versions_differ(job, severity):
    versions = job.log.versions()
    seen = [one for version in versions for one in job.log.of(("version", version))]
    return finding(job, "mixed-nccl", seen, " and ".join(versions), severity=severity)


def network(job):
    """Hosts that do not reach each other, and network cards that give up."""
    log = job.log
    code, seen = "unreachable-peer", log.of("unreachable-peer")
    if not seen and any(credible(log, one) for one in log.of("rendezvous-failed")):
        code, seen = "rendezvous-failed", log.of("rendezvous-failed")
    if not seen and any(job.ranks(log.of("retrying")) & {*group.members} for group in job.unfinished()):
        seen = log.of("retrying")
    nothing_works = len(job.unfinished()) == len(log.groups) > 0
    if job.nodes > 1 and (seen or nothing_works) and (found := wrong_interfaces(job, seen)):
        return found
    return [finding(job, code, seen)] if seen else network_cards(job)


def wrong_interfaces(job, failures):
    used = job.interfaces
    shared = Counter(address for _, address in used.values())
    loops = [host for host, (name, address) in used.items() if name == "lo" or address.startswith(("127.", "::1"))]
    local = [
        host
        for host, (name, address) in used.items()
        if shared[address] > 1 or VIRTUAL.match(name) or address.startswith(("169.254.", "fe80"))
    ]
    code = "loopback-interface" if len(loops) > 1 or loops and len(used) == 1 else "wrong-interface"
    hosts = loops if code == "loopback-interface" else local + loops
    seen = job.log.setting("NCCL_SOCKET_IFNAME")[:2] + failures[:2] + [group.seen for group in job.unfinished()][:1]
    said = ", ".join(f"{host} uses {' '.join(used[host])}" for host in hosts[:8])
    ranks = [rank for rank, member in job.rows.items() if member.process[0] in hosts]
    return [finding(job, code, seen, said, ranks)] if hosts else []


def network_cards(job):
    log, code = job.log, "ib-error" if "ib-error" in job.log.seen else "roce-gid"
    seen, texts = log.of(code), [one.text for one in log.of(code)]
    roce = any("RoCE" in kept.rdma for kept in log.processes.values()) or log.setting("NCCL_IB_GID_INDEX")
    worked = max([0, *log.enqueued.values(), *(stuck.seq for stuck in log.stuck.values())]) > 5
    if any(map(COMPLETION.search, texts)):
        status = {int(match[1]) for match in map(STATUS.search, texts) if match}
        seen = seen + log.setting("NCCL_IB_GID_INDEX")[:1]
        if status & {1, 4} or any("local access violation" in text or "LOC_LEN" in text for text in texts):
            code = "ib-mtu"
        elif roce and status & {12, 13} and not worked:
            code = "roce-gid"
    elif not roce:
        code = "ib-error"
    return [finding(job, code, seen)] if texts else []


def hangs(job):
    """What the pattern of the timeouts says, process group by process group; the most certain answer leads."""
    log, by_group = job.log, defaultdict(list)
    for stuck in log.stuck.values():
        by_group[stuck.group].append(stuck)
    found = [finding(job, code, log.of(code)) for code in ("desync", "straggler") if code in log.seen]
    found += [judge(job, group, stuck) for group, stuck in by_group.items()]
    return sorted(found + unmatched_messages(job), key=lambda one: HANGS.index(one.code))[:1]


def judge(job, group, all_stuck):
    """One process group: who is stuck in which collective, and who is not there at all?"""
    stuck, others = {}, {}
    for one in sorted(all_stuck, key=lambda one: one.seq):
        rank = job.rank(one.seen.who)
        stuck.setdefault(one.local if rank is None else rank, one)
    first, local = min(one.seq for one in stuck.values()), {one.local for one in stuck.values()}
    seen = [one.seen for one in stuck.values()]
    calls = {rank: one.call for rank, one in stuck.items() if one.seq == first}
    said = f"collective {first}: {spoken(calls)}" if first else spoken(calls)
    # Groups of one number may be several (HSDP): then one local rank stands for several ranks, and nothing compares.
    if len(local) == len(stuck):
        if mismatch(calls):
            return finding(job, "desync", seen, said, minority(calls))
        if len(calls) < len(stuck) and not any(one.call[0].strip("_") in POINTWISE for one in stuck.values()):
            said = f"{in_words(calls)} at collective {first}, the others beyond it"
            return finding(job, "straggler", seen, said, calls)
        others = {rank: n for (name, rank), n in job.log.enqueued.items() if name == group and rank not in local}
        if behind := {rank for rank, last in others.items() if last < first}:
            said = f"{in_words(behind)} did not enqueue collective {first} ({spoken(calls)})"
            return finding(job, "straggler", seen, said, behind)
    world = group in ("", "0") or "default_pg" in group
    if world and (silent := set(range(job.size)) - {*stuck} - {*others}):
        return silent_ranks(job, silent, first, calls, said, seen)
    links = [link for pair, link in job.links.items() if stuck.keys() >= {*pair} and link.transport[:3] != "SHM"]
    kinds, hosts = {link.transport[:3] for link in links}, {job.rows[r].process[0] for r in stuck if r in job.rows}
    code = "net-hang" if "NET" in kinds and len(hosts) > 1 else "p2p-hang" if "P2P" in kinds else "timeout-unknown"
    return finding(job, code, seen + [link.seen for link in links][:2], said, stuck)


def silent_ranks(job, silent, first, calls, said, seen):
    log, said = job.log, f"{said} wait"
    if not silent <= {*job.rows, *log.dumps, *log.ranks, *(end.rank for end in log.exits.values())}:
        return finding(job, "timeout-unknown", seen, f"{said}; {in_words(silent)} not shown in this log", calls)
    small = all(size is None or size[0] <= 1024 for _, size in calls.values())
    bars = [bar for bar in log.bars.values() if job.rank(bar.who) in (0, None)][-1:]
    if silent == {0} and first <= 20 and (small or bars):
        said += "".join(f"; its last progress: {split_tag(bar.raw)[2].strip()[:80]}" for bar in bars)
        return finding(job, "rank0-busy", seen + bars, said, [0])
    return finding(job, "straggler", seen, f"{said}; {in_words(silent)} did not report", silent)


def minority(calls):
    """The ranks that differ from most, or all of them."""
    (call, count), *_ = Counter(calls.values()).most_common(1)
    return [rank for rank in calls if calls[rank] != call] if 2 * count > len(calls) else list(calls)


def spoken(calls):
    groups = defaultdict(list)
    for rank, call in sorted(calls.items()):
        groups[call].append(rank)
    sizes = {call: f" ({call[1][0]} to {call[1][1]} elements)" if call[1] else "" for call in groups}
    return ", ".join(f"{in_words(ranks)} in {call[0]}{sizes[call]}" for call, ranks in groups.items())


def in_words(ranks):
    """{0, 1, 2, 5} -> 'ranks 0-2, 5'"""
    runs = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank{'s' * (len(ranks) != 1)} {text}"


def unmatched_messages(job):
    """Messages in the dumps: a send that waits although its receiver posted fewer receives, or the other way round."""
    log, found = job.log, []
    for (kind, group, sender, receiver), calls in log.messages.items() if not log.wrapped else ():
        mine, peer, other = (sender, receiver, "recv") if kind == "send" else (receiver, sender, "send")
        there = len(log.messages.get((other, group, sender, receiver), ()))
        waiting = [call for call in calls if not call.done]
        if waiting and peer in log.dumps and mine in log.dumps and there < len(calls):
            said = f"{kind} {len(calls)} of rank {sender} to rank {receiver} waits; rank {peer} posted {there} {other}"
            seen = Seen(log.dumps[mine], 1, waiting[0].text, Who(rank=mine))
            found.append(finding(job, "straggler", [seen], said, [peer]))
    return found


def unexplained(job):
    """Something failed and nothing above says why."""
    log, exits, echoes, lost = job.log, job.log.ended_badly(), job.log.of("echo"), job.log.of("peer-lost")
    if "init-incomplete" in log.seen:
        return [finding(job, "init-incomplete", log.of("init-incomplete"))]
    alone = [end for end in exits if end.root and job.rank_at_exit(end) not in job.ranks(echoes)]
    if alone and alone[0].code > 0:
        said = f"exit code {alone[0].code}; its traceback is not shown in this log"
        ranks = {job.rank_at_exit(end) for end in alone} - {None}
        return [finding(job, "rank-raised", [alone[0].seen], said, ranks)]
    stuck = job.unfinished()
    if not job.failing():  # the log may simply end here; that nothing was connected is still worth a word
        nothing_works = stuck and len(stuck) == len(log.groups)
        return [began(job, stuck, "fail" if lost else "note")] if nothing_works else []
    if len(log.versions()) > 1:
        return [versions_differ(job, "fail")]
    if not lost and any("nccl" in one.text.lower() for one in echoes):
        return [finding(job, "nccl-error", log.of("nccl-warning") + echoes)]
    if lost or echoes:
        said = echoes[0].text if echoes else lost[0].text
        return [finding(job, "peer-lost", lost + echoes, said[:200], job.ranks(echoes))]
    if stuck:
        return [began(job, stuck, "fail")]
    if exits:
        ranks = {job.rank_at_exit(end) for end in exits} - {None}
        return [finding(job, "rank-crashed", [end.seen for end in exits], f"exit code {exits[0].code}", ranks)]
    return [finding(job, "timeout-unknown", log.of("watchdog"))] if log.of("watchdog") else []


def began(job, stuck, severity):
    group = max(stuck, key=lambda one: one.size)
    missing = set(range(group.size)) - {*group.members}
    said = f"Init START on {len(group.members)} of {group.size} ranks, Init COMPLETE not shown in this log"
    said += f"; {in_words(missing)} never appeared" if missing else ""
    return finding(job, "init-incomplete", [group.seen], said, missing, severity=severity)


def slowness(job):
    """Paths that work but are not the best the machine has. Only what is printed counts: absence proves nothing."""
    log, net = job.log, {pair: link for pair, link in job.links.items() if link.transport.startswith("NET")}
    found = slow_p2p(job, {pair: link for pair, link in job.links.items() if link.transport.startswith("SHM")})
    inside = {pair: link for pair, link in net.items() if on_one_machine(job, link.hosts)}
    if inside:
        off = log.setting("NCCL_SHM_DISABLE")
        found.append(of_links(job, "shm-disabled-by-user" if off else "same-host-over-net", inside, off))
    outside = {pair: link for pair, link in net.items() if pair not in inside}
    staged = {p: k for p, k in outside.items() if re.fullmatch(r"NET/(?:IB|[^/]*RDMA)[^/]*", k.transport)}
    if staged:
        level = log.setting("NCCL_NET_GDR_LEVEL")
        why = (
            {"why": "NCCL_NET_GDR_LEVEL=LOC forbids GPUDirect"}
            if log.of(("setting", "NCCL_NET_GDR_LEVEL", "LOC"))
            else {}
        )
        found.append(of_links(job, "ib-without-gdr", staged, log.of("gdr-off") + level, **why))
    tcp = {pair: link for pair, link in outside.items() if link.transport == "NET/Socket"}
    chosen = job.nodes > 1 and not outside and any(kept.network == "Socket" for kept in log.processes.values())
    listed = any(kept.rdma for kept in log.processes.values())
    by_user = log.setting("NCCL_IB_DISABLE", "NCCL_NET")
    if tcp and (listed or log.setting("NCCL_IB_DISABLE")) or chosen and by_user:
        found.append(of_links(job, "ib-unused", tcp, by_user))
    return found


def slow_p2p(job, shm):
    log, off = job.log, job.log.of("p2p-off")
    together = max(Counter(member.process[0] for member in job.rows.values()).values(), default=0)
    by_user = log.setting("NCCL_P2P_DISABLE")
    by_user += log.of(*(("setting", "NCCL_P2P_LEVEL", level) for level in ("LOC", "NVL", "PIX", "PXB")))
    if by_user and (shm or not job.links and together > 1):
        return [of_links(job, "p2p-disabled-by-user", shm, by_user)]
    if log.of("p2p-unavailable") or not (shm or off):
        return []
    why = {"why": "the driver reports that they cannot reach each other; expected on GeForce"} if off else {}
    return [of_links(job, "p2p-unavailable", shm, off[:3], **why)]


def on_one_machine(job, hosts):
    """One host name; or two that use one address, as containers of one machine do."""
    if None in hosts or hosts[0] == hosts[1]:
        return hosts[0] == hosts[1] is not None
    (name, a), (_, b) = (job.interfaces.get(host, ("lo", "")) for host in hosts)
    return a == b and name != "lo" and not VIRTUAL.match(name)


def of_links(job, code, links, seen, **other):
    pairs = sorted(links)
    said = ", ".join(f"{a} to {b} {links[a, b].transport}" for a, b in pairs[:4])
    said += f" ... {len(pairs)} links" if len(pairs) > 4 else ""
    ranks = {rank for pair in pairs for rank in pair} or job.ranks(seen)
    return finding(job, code, seen + [links[pair].seen for pair in pairs], said, ranks, **other)


def remarks(job, causes):
    log, codes = job.log, {one.code for one in causes}
    names = ("spliced-log", "ib-port", "dump-refused", *(("stopped", "nccl-warning") if not causes else ()))
    found = [finding(job, code, log.of(code)) for code in names if code in log.seen]
    if "cumem-note" in log.seen and "cumem-host" not in codes:
        why, do = "often a container without NUMA permissions", "nothing, if /dev/shm is large enough"
        seen, said = log.of("cumem-note"), "NCCL falls back to /dev/shm"
        found.append(finding(job, "cumem-host", seen, said, severity="note", why=why, do=do))
    if "net-ignored" in log.seen:
        found.append(finding(job, "net-mismatch", log.of("net-ignored"), severity="note"))
    if len(log.versions()) > 1 and "mixed-nccl" not in codes:
        found.append(versions_differ(job, "note"))
    return found


# ── the report ───────────────────────────────────────────────────────────────────────────────────────────────────────
def verdict_of(found):
    severities = {one.severity for one in found}
    return "fail" if "fail" in severities else "slow" if "slow" in severities else "ok"


def as_json(job, found, after):
    hosts = {host: {"ranks": [], "interface": None, "address": None, "gpus": []} for host in job.hosts}
    for host, (name, address) in job.interfaces.items():
        hosts[host] |= {"interface": name, "address": address}
    for rank, member in job.rows.items():
        here = hosts.setdefault(member.process[0], {"ranks": [], "interface": None, "address": None, "gpus": []})
        here["ranks"].append(rank)
        here["gpus"].append({"rank": rank, "cuda": int(member.cuda) if member.cuda else None, "bus": member.bus})
    links = sorted(job.links.items())
    return {
        "verdict": verdict_of(found),
        "nccl": job.log.versions(),
        "hosts": hosts,
        "ranks": job.size,
        "links": [{"from": a, "to": b, "transport": k.transport, "channels": k.channels} for (a, b), k in links],
        "findings": [
            {
                "code": one.code,
                "severity": one.severity,
                "cause": f"{one.what}. {one.why}".rstrip(". "),
                "fix": one.do,
                "ranks": one.ranks,
                "lines": [{"file": seen.file, "line": seen.line} for seen in one.seen[:EVIDENCE]],
            }
            for one in found
        ],
        "consequences": dict(after),
    }


def report(job, found, after):
    verdict, log = verdict_of(found), job.log
    out = [f"verdict: {verdict}" + (f" - {found[0].what}" if found and found[0].severity != "note" else "")]
    lines = f"{len(log.lengths)} files, {sum(log.lengths.values())} lines"
    version = ", ".join(log.versions()) or "version not shown in this log"
    out.append(f"NCCL {version}; {job.size} ranks, {len(job.hosts)} hosts, {lines}")
    out += whereabouts(job) + matrix(job)
    for number, one in enumerate(found, 1):
        out.append(f"\n{number}. [{one.severity}] {one.code}" + (f", {in_words(one.ranks)}" if one.ranks else ""))
        out.append(f"   what      {one.what}")
        out += [f"   evidence  {seen.file}:{seen.line}  {seen.raw.strip()[:140]}" for seen in one.seen[:EVIDENCE]]
        out += [f"   why       {one.why}"] * bool(one.why) + [f"   do        {one.do}"]
    if not found:
        out.append("\nnothing wrong or slow is shown in this log")
    if after and verdict == "fail":
        out.append("\nconsequences, not causes: " + ", ".join(f"{n} x {label}" for label, n in sorted(after.items())))
    return "\n".join(out + absences(job))


def whereabouts(job):
    out = ["", "  rank  host                  GPU  bus     pid      interface"] if job.rows else []
    for rank, member in sorted(job.rows.items())[:64]:
        host, pid = member.process
        interface = " ".join(job.interfaces.get(host, ()))
        out.append(f"  {rank:4}  {host:20}  {member.cuda or '?':>3}  {member.bus or '?':6}  {pid:7}  {interface}")
    out += [f"  ... and {len(job.rows) - 64} more"] * (len(job.rows) > 64)
    return out + ["  no communicator spans all ranks: these numbers follow hosts and GPUs"] * job.guessed


def matrix(job):
    """Links from row to column. Above 8 ranks a matrix does not fit a line: counts per transport instead."""
    ranks = sorted({rank for pair in job.links for rank in pair})
    if len(ranks) > 8 or not ranks:
        kinds = Counter(link.transport for link in job.links.values()).most_common()
        return ["", "  links: " + ", ".join(f"{n} x {kind}" for kind, n in kinds)] if kinds else []
    cells = {pair: f"{link.transport} x{link.channels}" for pair, link in job.links.items()}
    width = max(map(len, cells.values())) + 2
    out = ["", "  from\\to " + "".join(f"{rank:<{width}}" for rank in ranks)]
    return out + [f"  {a:7} " + "".join(f"{cells.get((a, b), '.'):<{width}}" for b in ranks) for a in ranks]


def absences(job):
    missing, groups = [], job.log.groups.values()
    if job.log.processes and not job.links:
        missing.append("links (NCCL 2.22 and later prints them at the first collective, and only those it uses)")
    if groups and len(job.unfinished()) == len(groups):
        missing.append("Init COMPLETE")
    if 0 < len(job.rows) < job.size:
        missing.append(f"lines of {in_words(set(range(job.size)) - {*job.rows})}")
    if job.log.processes and job.nodes > 1 and not any("NET" in link.transport for link in job.links.values()):
        missing.append("links between hosts, hence whether they use GPUDirect")
    return ["\nnot shown in this log: " + "; ".join(missing)] if missing else []


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help="log or flight-recorder dump; - for standard input")
    parser.add_argument("--json", action="store_true", help="print the diagnosis as JSON")
    parser.add_argument("--codes", action="store_true", help="list every finding with its reason and remedy")
    options = parser.parse_args(arguments)
    sys.stdout.reconfigure(errors="replace")
    if options.codes:
        for code, rule in RULES.items():
            print(f"{code:22}{rule.severity:6}{rule.what}; {rule.why}\n{'':28}do: {rule.do}")
        return 0
    if not options.files:
        parser.error("give at least one FILE, or - for standard input")
    log = Log()
    try:
        for name in options.files:
            if name == "-":
                read(log, sys.stdin.buffer, "-")
            else:
                with open(name, "rb") as stream:
                    read(log, stream, name)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not log.recognised:
        nothing = "nothing of NCCL, PyTorch or torchrun in this input; was NCCL_DEBUG=INFO set?"
        print("error: " + next((one.text for one in log.of("dump-refused")), nothing), file=sys.stderr)
        return 2
    job, found, after = diagnose(log)
    print(json.dumps(as_json(job, found, after), indent=2) if options.json else report(job, found, after))
    return 1 if verdict_of(found) == "fail" else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # `| head` closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
