"""tools/nccl_log.py: each log gets its diagnosis, whatever wraps, cuts or renumbers it.

tests/nccl/ holds composed and captured logs. What no file shows is composed here, line by line, in NCCL's own spelling.
"""

import ast
import io
import json
import os
import pickle
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools import nccl_log

HERE = Path(__file__).resolve().parent
TOOL = HERE.parent / "tools" / "nccl_log.py"


def diagnose(*files):
    """Texts (or (name, bytes)) -> the JSON diagnosis and the printed report."""
    state = nccl_log.Log()
    for number, file in enumerate(files):
        name, data = file if isinstance(file, tuple) else (f"log{number}", file)
        nccl_log.read(state, io.BytesIO(data if isinstance(data, bytes) else data.encode()), name)
    job, found, after = nccl_log.diagnose(state)
    result = nccl_log.as_json(job, found, after)
    json.dumps(result)
    result["report"] = nccl_log.report(job, found, after)
    return result


def codes(result):
    return [(one["code"], one["severity"]) for one in result["findings"]]


def first(result):
    return result["findings"][0] if result["findings"] else {"code": None, "ranks": [], "fix": "", "cause": ""}


# file -> verdict, findings, ranks of the first, words of its fix or cause, words that no finding may say
# fmt: off
LOGS = {
    "00_healthy_8xh100": ("ok", [], None, [], []),
    "01_shm_too_small": ("fail", [("shm-too-small", "fail"), ("p2p-unavailable", "note")], [2, 3],
                         ["--shm-size", "--ipc=host", "emptyDir", "Memory"], ["NCCL_SOCKET_IFNAME"]),
    "02_ifname_docker0": ("fail", [("wrong-interface", "fail")], [0, 1], ["unset NCCL_SOCKET_IFNAME", "docker0"], ["firewall", "dead"]),
    "03_ib_without_gdr": ("slow", [("ib-without-gdr", "slow")], [0, 1, 2, 3],
                          ["nvidia-peermem", "DMA-BUF", "ACS", "NCCL_NET_GDR_LEVEL"], ["ocket", "libnccl-net"]),
    "04_consumer_gpus_no_p2p": ("slow", [("p2p-unavailable", "slow")], [0, 1], ["gradient accumulation", "GeForce"],
                                ["NCCL_P2P_DISABLE=1", "NET/IB", "GDR"]),
    "05_p2p_hang_first_collective": ("fail", [("p2p-hang", "fail")], [0, 1], ["NCCL_P2P_DISABLE=1", "ACS", "IOMMU", "driver"], ["timeout="]),
    "06_mixed_nccl_versions": ("fail", [("mixed-nccl", "fail")], [0, 1], ["22703", "22705", "LD_LIBRARY_PATH", "wheel"], ["network"]),
    "07_duplicate_gpu": ("fail", [("duplicate-gpu", "fail")], [0, 1, 2, 3], ["set_device", "LOCAL_RANK", "device_id"], ["hardware"]),
    "08_firewall_between_nodes": ("fail", [("unreachable-peer", "fail")], [2, 3], ["TCP", "ip_local_port_range", "interface", "192.0.2.11"],
                                  ["unhandled system", "InfiniBand", "ibverbs"]),
    "09_nvls_fabric_manager": ("fail", [("nvls-fabric", "fail")], [0, 3], ["nvidia-fabricmanager", "NCCL_NVLS_ENABLE=0", "reset"], []),
    "10_oom_on_one_rank": ("fail", [("out-of-memory", "fail")], [2], ["expandable_segments", "bucket", "336.00 MiB"], ["timeout", "timed out"]),
    "11_desync_uneven_batches": ("fail", [("desync", "fail")], [3], ["_ALLGATHER_BASE", "ALLREDUCE", "drop_last", "48152"],
                                 ["P2P", "NVLink", "transport"]),
    "12_rank0_caching_latents_timeout": ("fail", [("rank0-busy", "fail"), ("p2p-unavailable", "note")], [0],
                                         ["beforehand", "timeout=", "gloo", "87%"], ["network"]),
    "13_rank_killed_sigkill": ("fail", [("rank-killed", "fail")], [1], ["dmesg", "cgroup", "node-b", "--workers"],
                               ["RoCE", "GID", "cable", "timeout"]),
    "14_spliced_block_buffered": ("slow", [("ib-without-gdr", "slow"), ("spliced-log", "note")], [0, 1, 2, 3],
                                  ["nvidia-peermem"], ["libnccl-net"]),
    "ok": ("ok", [], None, [], []),
    "p2p_disabled": ("slow", [("p2p-disabled-by-user", "slow")], [0, 1], ["unset NCCL_P2P_DISABLE"], ["GeForce"]),
    "kill": ("fail", [("rank-killed", "fail")], [1], ["dmesg"], []),
    "desync": ("fail", [("desync", "fail")], [0, 1], ["ALLREDUCE", "_ALLGATHER_BASE"], ["P2P", "transport"]),
    "oom": ("fail", [("out-of-memory", "fail")], [1], ["400.00 GiB"], []),
    "dup": ("fail", [("duplicate-gpu", "fail")], [0, 1], ["LOCAL_RANK"], []),
}
# fmt: on


def text_of(name):
    return (HERE / "nccl" / f"{name}.log").read_text()


def check(result, name, ranks=True):
    verdict, expected, who, words, never = LOGS[name]
    assert result["verdict"] == verdict, result["report"]
    assert codes(result) == expected, result["report"]
    if expected:
        assert not ranks or first(result)["ranks"] == who, result["report"]
        said = first(result)["cause"] + first(result)["fix"]
        assert not [word for word in words if word not in said]
        everything = "".join(one["cause"] + one["fix"] for one in result["findings"])
        assert not [word for word in never if word in everything]
    else:
        assert "nothing wrong or slow" in result["report"]


@pytest.mark.parametrize("name", LOGS)
def test_each_log_gets_its_diagnosis(name):
    check(diagnose(text_of(name)), name)


def test_every_log_of_the_folder_is_expected():
    assert {path.stem for path in (HERE / "nccl").glob("*.log")} == set(LOGS)


def test_evidence_points_at_the_lines_that_say_it():
    for name in LOGS:
        lines = text_of(name).splitlines()
        for one in diagnose(text_of(name))["findings"]:
            assert one["lines"], f"{name}: {one['code']} without evidence"
            assert all(lines[line["line"] - 1].strip() for line in one["lines"])
    assert "SIGKILL" in diagnose(text_of("kill"))["report"]
    unprefixed = {line["line"] for line in first(diagnose(text_of("09_nvls_fabric_manager")))["lines"]}
    assert {24, 25, 26} <= unprefixed  # NCCL's three-line warning stays whole


def test_hosts_ranks_gpus_and_links_of_a_healthy_log():
    result = diagnose(text_of("00_healthy_8xh100"))
    assert result["nccl"] == ["2.27.5"] and result["ranks"] == 8
    host = result["hosts"]["node-a"]
    assert (
        host["interface"] == "eth0"
        and host["address"] == "192.0.2.11"
        and host["gpus"][3] == {"rank": 3, "cuda": 3, "bus": "19000"}
    )
    assert {(link["from"], link["to"]) for link in result["links"]} == {(rank, (rank + 1) % 8) for rank in range(8)}
    # 'Channel 00/24' and '23/24' are listed: 24 channels, not the few lines that are there.
    assert {link["channels"] for link in result["links"]} == {24}


def test_consequences_are_counted_not_listed():
    result = diagnose(text_of("10_oom_on_one_rank"))
    assert result["consequences"]["watchdog timeout"] == 3 and result["consequences"]["closed connection"] >= 4
    assert "consequences, not causes" in result["report"]


def test_what_a_log_lacks_is_said_to_be_not_shown():
    assert "not shown in this log" in diagnose(text_of("06_mixed_nccl_versions"))["report"]


# --- the same log in other clothes ------------------------------------------------------------------------------------
NCCL_LINE = re.compile(r"^(\[[\d: -]+\] )?([\w.-]+):(\d+):")


def each_line(text, prefix):
    """prefix(index, pid) before every line; lines without a pid count as the launcher's."""
    out = []
    for number, line in enumerate(text.split("\n")[:-1]):
        match = NCCL_LINE.match(line)
        out.append(prefix(number, match[3] if match else None) + line)
    return "\n".join(out) + "\n"


def numbered(text):
    """pid -> 0, 1, 2 … in order of appearance"""
    pids = list(dict.fromkeys(match[3] for line in text.split("\n") if (match := NCCL_LINE.match(line))))
    return {pid: index for index, pid in enumerate(pids)}


def tagged(form):
    def wrap(text):
        index = numbered(text)
        return each_line(text, lambda number, pid: form.format(index[pid]) if pid in index else "")

    return wrap


# fmt: off
WRAPPERS = {
    "torchrun --tee": tagged("[default{0}]:"), "c10d": tagged("[rank{0}]:"), "mpirun": tagged("[1,{0}]<stdout>:"),
    "srun -l": tagged("{0}: "), "compose": lambda text: each_line(text, lambda n, pid: "svc-1  | "),
    "srun -l, one task per node": lambda text: each_line(text, lambda n, pid: "0: "),
    "mpirun, one task": lambda text: each_line(text, lambda n, pid: "[1,0]<stderr>:"),
    "torchrun --tee, its own lines too": lambda text: re.sub(r"(?m)^\[rank(\d+)\]:", r"[default\1]:[rank\1]:", tagged("[default{0}]:")(text)),
    "docker compose in a pod": lambda text: each_line(text, lambda n, pid: "[pod/train-0/main] 2026-03-10T09:14:02.118Z trainer-1  | "),
    "kubectl --prefix": lambda text: each_line(text, lambda n, pid: "[pod/train-0/main] "),
    "cri": lambda text: each_line(text, lambda n, pid: "2026-03-10T09:14:02.118Z stdout F "),
    "ray": tagged("(Worker pid=4{0}, ip=192.0.2.9) "), "crlf": lambda text: text.replace("\n", "\r\n"),
    "colours": lambda text: each_line(text, lambda n, pid: "\x1b[32m").replace("\n", "\x1b[0m\n"),
    "stamps": lambda text: each_line(text, lambda n, pid: f"[2026-03-10 09:14:{n % 60:02}.{n % 1000:03}] " if pid else ""),
    "short stamps": lambda text: each_line(text, lambda n, pid: f"09:14:{n % 60:02} " if pid else ""),
    "blank lines": lambda text: text.replace("\n", "\n\n"),
    "renumbered": lambda text: re.sub(r"(node-[ab]|ws-0\d|c3f1a9d2e7b4):(\d+):(\d+)", lambda m: f"gpu{m[1]}:7{m[2]}:7{m[3]}",
                                      re.sub(r"pid: (\d+)", r"pid: 7\1", text)),
    "full host names": lambda text: re.sub(r"(?m)^(\[[\d: -]+\] )?(node-[ab]|ws-0\d):", r"\1\2.example.org:", text),
}
# fmt: on


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", LOGS)
def test_wrapped_logs_give_the_same_diagnosis(name, wrapper):
    check(diagnose(WRAPPERS[wrapper](text_of(name))), name)


@pytest.mark.parametrize("name", LOGS)
def test_one_file_per_rank_gives_the_same_diagnosis(name):
    files = {}
    for line in text_of(name).split("\n"):
        match = NCCL_LINE.match(line)
        files.setdefault(match[3] if match else "", []).append(line)
    result = diagnose(*[(f"nccl.{pid}.log", "\n".join(lines) + "\n") for pid, lines in files.items()])
    assert result["verdict"] == LOGS[name][0]
    if not name.startswith("14"):
        assert [code for code, _ in codes(result)] == [code for code, _ in LOGS[name][1]], result["report"]


@pytest.mark.parametrize("name", ["03_ib_without_gdr", "ok", "00_healthy_8xh100"])
@pytest.mark.parametrize("size", [257, 701, 1024, 4096])
def test_block_buffering_invents_nothing(name, size):
    """Each rank's text cut into blocks that end anywhere, as a pipe does it."""
    whole = diagnose(text_of(name))
    ranks = {}
    for line in text_of(name).splitlines(keepends=True):
        match = NCCL_LINE.match(line)
        ranks.setdefault(match[3] if match else "", []).append(line)
    blocks = []
    for pieces in ranks.values():
        text = "".join(pieces)
        blocks += [(at, text[at : at + size]) for at in range(0, len(text), size)]
    blocks.sort(key=lambda block: block[0])
    cut = diagnose("".join(text for _, text in blocks))
    assert cut["verdict"] == whole["verdict"], cut["report"]
    assert set(cut["hosts"]) == set(whole["hosts"]) and cut["ranks"] == whole["ranks"]
    assert {(k["from"], k["to"], k["transport"]) for k in cut["links"]} <= {
        (k["from"], k["to"], k["transport"]) for k in whole["links"]
    }
    assert [c for c, _ in codes(cut) if c != "spliced-log"] == [c for c, _ in codes(whole)]


# --- composed logs: the cases no file shows ---------------------------------------------------------------------------
def line(host, pid, text, device=0, tid=None):
    return f"{host}:{pid}:{tid or pid} [{device}] NCCL INFO {text}\n"


def warn(host, pid, text, source="init.cc:100", device=0):
    return f"\n{host}:{pid}:{pid} [{device}] {source} NCCL WARN {text}\n"


def job(
    hosts=("node-a", "node-b"),
    per_host=1,
    complete=True,
    version="2.27.5",
    interface="eth0",
    address="192.0.2.1{0}",
    identity="0xabc",
):
    """The opening of a run: interface, version, START and COMPLETE of every rank."""
    size, out = len(hosts) * per_host, ""
    for rank in range(size):
        node, local = divmod(rank, per_host)
        head = (hosts[node], 1000 * (node + 1) + local)
        out += line(*head, f"Bootstrap: Using {interface}:{address.format(node)}<0>", local)
        out += line(*head, f"NCCL version {version}+cuda12.9", local)
        comm = f"comm 0x{rank + 1}0 rank {rank} nranks {size} cudaDev {local} nvmlDev {local} busId {local + 1}000 commId {identity}"
        out += line(*head, f"ncclCommInitRankConfig {comm} - Init START", local)
        out += line(
            *head,
            f"comm 0x{rank + 1}0 rank {rank} nRanks {size} nNodes {len(hosts)} localRanks {per_host} localRank {local} MNNVL 0",
            local,
        )
        if complete:
            out += line(*head, f"ncclCommInitRankConfig {comm} - Init COMPLETE", local)
    return out


def links(transport, hosts=("node-a", "node-b"), pairs=((0, 1), (1, 0)), per_host=1):
    """Link lines as sender and receiver print them."""
    out = ""
    for a, b in pairs:
        for rank, way in ((a, "send"), (b, "receive")):
            node, local = divmod(rank, per_host)
            kind = f" [{way}]" if transport.startswith("NET") else ""
            if kind or rank == a:
                out += line(
                    hosts[node],
                    1000 * (node + 1) + local,
                    f"Channel 00/0 : {a}[{a % per_host}] -> {b}[{b % per_host}]{kind} via {transport}",
                    local,
                )
    return out


def timeout(rank, seq=1, op="ALLREDUCE", size=1, group="0(default_pg)", enqueued=None, local=None):
    local = rank if local is None else local
    ident = group.split("(")[0]
    return (
        f"[rank{rank}]:[E318 14:31:07.2 ProcessGroupNCCL.cpp:685] [Rank {local}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={size}, NumelOut={size}, Timeout(ms)=600000) ran for 600002 milliseconds before timing out.\n"
        f"[rank{rank}]:[E318 14:31:07.2 ProcessGroupNCCL.cpp:2252] [PG ID {ident} PG GUID {group} Rank {local}]  failure detected by watchdog "
        f"at work sequence id: {seq} PG status: last enqueued work: {enqueued or seq}, last completed work: {seq - 1}\n"
    )


def died(rank, code=1, pid=1000):
    return f"E0326 04:10:08.33 12960 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: {code}) local_rank: {rank} (pid: {pid}) of binary: python\n"


BACKEND_ERROR = (
    '[rank0]: Traceback (most recent call last):\n[rank0]:   File "/w/ddp_train.py", line 9, in <module>\n'
    "[rank0]: torch.distributed.DistBackendError: NCCL error in: x.cpp:94, unhandled system error, NCCL version 2.27.5\n"
)
ONE_HOST = dict(hosts=("node-a",), per_host=2)
LOCAL = dict(hosts=("node-a",), pairs=((0, 1), (1, 0)), per_host=2)

# fmt: off
CASES = {
    "case 2: a veth was picked and init hangs": (
        job(complete=False, interface="veth3a1", address="10.0.0.1{0}"), "fail", "wrong-interface", "name the NIC"),
    "case 2: docker0 on one of two hosts": (
        job(complete=False).replace("eth0:192.0.2.11", "docker0:172.17.0.1") + timeout(0), "fail", "wrong-interface", "docker0"),
    "case 3: pattern matches no interface": (
        line("node-a", 1, "NCCL_SOCKET_IFNAME set by environment to ens9") + warn("node-a", 1, "Bootstrap : no socket interface found", "bootstrap.cc:45"),
        "fail", "no-interface", "NCCL_SOCKET_IFNAME"),
    "case 4: lo on both hosts": (
        line("node-a", 1000, "NCCL_SOCKET_IFNAME set by environment to ^docker0") + job(complete=False, interface="lo", address="127.0.0.1"),
        "fail", "loopback-interface", "^docker0,lo"),
    "case 6: GPUDirect on one node only": (
        job() + links("NET/IB/0/GDRDMA").replace("[receive] via NET/IB/0/GDRDMA", "[receive] via NET/IB/0"), "slow", "ib-without-gdr", "every node"),
    "case 7: NCCL says why GPUDirect is off": (
        job() + line("node-a", 1000, "GPU Direct RDMA Disabled for GPU 0 / HCA 0 (distance 4 > 3)") + links("NET/IBext_v8/0"), "slow", "ib-without-gdr", "ACS"),
    "case 8: torch 2.0 wording of the same hang": (
        job(**ONE_HOST) + links("P2P/IPC", **LOCAL) + "".join(
            f"[E ProcessGroupNCCL.cpp:475] [Rank {r}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=BROADCAST, "
            f"Timeout(ms)=1800000) ran for 1800210 milliseconds before timing out.\n" for r in (0, 1)), "fail", "p2p-hang", "NCCL_P2P_DISABLE=1"),
    "case 12: CUDA 802 on an NVSwitch machine": (
        "[rank0]: Traceback (most recent call last):\n[rank0]: RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized\n",
        "fail", "nvls-fabric", "fabricmanager"),
    "case 13: Fabric Manager restarted under live GPUs": (
        job(**ONE_HOST, complete=False) + warn("node-a", 1000, "Cuda failure 1 'invalid argument'", "transport/nvls.cc:598") + BACKEND_ERROR,
        "fail", "nvls-fabric", "reset the GPUs"),
    "2.28 goes on without NVLS": (
        job(**ONE_HOST, complete=False) + warn("node-a", 1000, "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401", "transport/nvls.cc:287")
        + job(**ONE_HOST), "slow", "nvls-fabric", "NCCL_NVLS_ENABLE=0"),
    "multi-node NVLink without IMEX": (
        job(complete=False) + warn("node-a", 1000, "MNNVL (cliqueSize 2) is available but not working on this system. Check the IMEX channel configuration", "mnnvl.cc:60"),
        "fail", "imex", "NCCL_MNNVL_ENABLE=0"),
    "case 15: locked memory": (
        job(complete=False) + warn("node-b", 2000, "Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory", "misc/ibvwrap.cc:278"),
        "fail", "memlock", "ulimit -l unlimited"),
    "case 16: MTU differs": (
        job() + warn("node-a", 1000, "NET/IB : Got completion from peer 192.0.2.12<47112> with status=4 opcode=0 len=0 vendor err 81 (Recv) hca mlx5_0", "transport/net_ib.cc:1"),
        "fail", "ib-mtu", "MTU"),
    "case 17: peer access for cuMem host memory": (
        job(**ONE_HOST, complete=False) + warn("node-a", 1000, "Cuda failure 217 'peer access is not supported between these two devices'", "transport/shm.cc:590"),
        "fail", "cumem-host", "NCCL_CUMEM_HOST_ENABLE=0"),
    "case 18: ranks disagree on cuMem host": (
        job(**ONE_HOST, complete=False) + warn("node-a", 1000, "Error while attaching to shared memory segment /dev/shm/nccl- (size 0)", "misc/shmutils.cc:1"),
        "fail", "cumem-host", "every rank"),
    "case 19: RoCE, retries exceeded at once": (
        job(complete=False) + line("node-a", 1000, "NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:192.0.2.11<0>") + line("node-a", 1000, "NCCL_IB_GID_INDEX set by environment to 0.")
        + warn("node-a", 1000, "NET/IB: Got completion from peer 192.0.2.12<4711> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_SEND(0) vendor_err=129 hca mlx5_0", "net_ib/p2p.cc:1"),
        "fail", "roce-gid", "NCCL_IB_GID_INDEX"),
    "2.19 wording: completion with error 12, InfiniBand": (
        job(version="2.19.3") + warn("node-a", 1000, "NET/IB : Got completion from peer 192.0.2.12<47534> with error 12, opcode 48, len 32764, vendor err 129", "transport/net_ib.cc:1295"),
        "fail", "ib-error", "peer's own log"),
    "a queue pair cannot be set up on RoCE": (
        job(complete=False) + line("node-a", 1000, "NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:192.0.2.11<0>")
        + warn("node-a", 1000, "Call to ibv_modify_qp failed with error Connection timed out", "misc/ibvwrap.cc:190"), "fail", "roce-gid", "show_gids"),
    "case 20: mixed NICs": (
        job(complete=False) + warn("node-a", 1000, "Detected mixed local Net device counts across ranks (min 1, max 4). Set NCCL_IGNORE_NET_MISMATCH=1 to continue.", "init.cc:1591 (initTransportsRank)"),
        "fail", "net-mismatch", "NCCL_IB_HCA"),
    "case 21: 2.19 wording": (
        job(complete=False) + warn("node-b", 2000, "socketStartConnect: Connect to 192.0.2.10<46187> failed : Connection timed out", "misc/socket.cc:483"),
        "fail", "unreachable-peer", "localhost"),
    "case 21: 2.14 wording": (
        job(complete=False) + warn("node-b", 2000, "Net : Connect to 192.0.2.10<46187> failed : No route to host", "include/socket.h:456"), "fail", "unreachable-peer", "TCP"),
    "case 21: 2.29 wording, only retries so far": (
        job(complete=False) + line("node-b", 2000, "ncclOsSocketPollConnect: connect to 192.0.2.10<46187> returned Connection refused, retrying (20/34) after sleep for 2000 msec"),
        "fail", "unreachable-peer", "TCP"),
    "case 22: 2.30 wording": (
        job(**ONE_HOST, complete=False).replace("busId 2000", "busId 1000")
        + warn("node-a", 1000, "Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this configuration.", "init.cc:1141 (initTransportsRank)"),
        "fail", "duplicate-gpu", "LOCAL_RANK"),
    "case 23: old versions mixed": (
        job(complete=False) + warn("node-b", 2000, "ncclSocketInit: connecting to address  with family 0 is neither AF_INET(2) nor AF_INET6(10)", "misc/socket.cc:1"),
        "fail", "mixed-nccl", "same torch wheel"),
    "case 23: the same text for an interface that does not exist": (
        line("node-b", 2000, "NCCL_SOCKET_IFNAME set by environment to eno7") + job(complete=False)
        + warn("node-b", 2000, "ncclSocketInit: connecting to address  with family 0 is neither AF_INET(2) nor AF_INET6(10)", "misc/socket.cc:1"),
        "fail", "no-interface", "ip -br addr"),
    "case 23b: message truncated": (
        job(complete=False) + warn("node-b", 2000, "Message truncated : received 1024 bytes instead of 256", "bootstrap.cc:103"), "fail", "mixed-nccl", "container"),
    "versions by PyTorch's own lines only": (
        "[rank0]: torch.distributed.DistBackendError: NCCL error in: a.cpp:1, unhandled system error, NCCL version 2.21.5\n"
        "[rank1]: torch.distributed.DistBackendError: NCCL error in: a.cpp:1, unhandled system error, NCCL version 2.20.5\n" + died(0), "fail", "mixed-nccl", "libnccl.so.2"),
    "case 24: no memory left for NCCL": (
        job(**ONE_HOST) + warn("node-a", 1001, "Cuda failure 'out of memory'", "include/alloc.h:185", 1) + warn("node-a", 1001, "Failed to CUDA calloc 10485760 bytes", "include/alloc.h:1", 1)
        + BACKEND_ERROR, "fail", "out-of-memory", "NCCL_BUFFSIZE"),
    "case 27: same number, another size": (
        job(**ONE_HOST) + links("P2P/CUMEM", **LOCAL) + timeout(0, 40, size=64) + timeout(1, 40, size=128), "fail", "desync", "same calls"),
    "case 28: 680 against 678": (
        job(**ONE_HOST) + links("P2P/CUMEM", **LOCAL) + timeout(0, 680) + timeout(1, 678), "fail", "straggler", "uneven steps"),
    "a rank that never enqueued the collective": (
        job(**ONE_HOST) + links("P2P/CUMEM", **LOCAL) + timeout(0, 78)
        + "[rank1]:[E 14:31 ProcessGroupNCCL.cpp:1858] [PG ID 0 PG GUID 0(default_pg) Rank 1] Received a dump signal due to a collective timeout from rank 0. "
          "Last enqueued NCCL work: 77, last completed NCCL work: 77.\n", "fail", "straggler", "rank 1"),
    "PyTorch's desync report names the rank": (
        job(**ONE_HOST) + timeout(0, 39) + "\t - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:\n"
        "\t   - [0] joined but didn't finish collective #39 (count from 1)\n\t     [1] finished collective #38, but didn't join collective #39 (count from 1)\n",
        "fail", "straggler", "py-spy"),
    "case 29: 6 here and 3 there, the peer's end is elsewhere": (
        job() + warn("node-a", 1000, "socketProgress: Connection closed by remote peer node-b<52811>", "misc/socket.cc:50") + line("node-a", 1000, "misc/socket.cc:752 -> 6")
        + BACKEND_ERROR, "fail", "peer-lost", "other ranks"),
    "case 30: containers of one host": (
        job(**ONE_HOST) + links("NET/Socket/0", **LOCAL), "slow", "same-host-over-net", "--ipc=host"),
    "case 30: containers with own names but one address": (
        job(address="192.0.2.10") + links("NET/Socket/0"), "slow", "same-host-over-net", "/dev/shm"),
    "NCCL_SHM_DISABLE": (
        line("node-a", 1000, "NCCL_SHM_DISABLE set by environment to 1.") + job(**ONE_HOST) + links("NET/Socket/0", **LOCAL), "slow", "shm-disabled-by-user", "NCCL_SHM_DISABLE"),
    "case 31: two libraries": (
        "Traceback (most recent call last):\n  File \"t.py\", line 1, in <module>\n    import torch\nImportError: libtorch_cuda.so: undefined symbol: ncclCommRegister\n",
        "fail", "library-conflict", "LD_PRELOAD"),
    "2.18: P2P switched off is logged as a level": (
        line("node-a", 1000, "NCCL_P2P_LEVEL set by environment to LOC") + job(**ONE_HOST, version="2.18.6") + links("SHM/direct/direct", **LOCAL).replace("00/0", "00"),
        "slow", "p2p-disabled-by-user", "NCCL_P2P_DISABLE"),
    "NVLink pair without peer access is fatal": (
        job(**ONE_HOST, complete=False) + warn("node-a", 1000, "P2P is disabled between NVLINK connected GPUs 0 and 1. This should not be the case", "graph/paths.cc:3"),
        "fail", "p2p-unavailable", "topo -p2p"),
    "PCIe beyond the P2P level: SHM appears without a word": (
        job(**ONE_HOST) + links("SHM/direct/direct", **LOCAL), "slow", "p2p-unavailable", "GeForce"),
    "RDMA listed, TCP used": (
        line("node-a", 1000, "NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:192.0.2.10<0>") + job() + links("NET/Socket/0"), "slow", "ib-unused", "NCCL_IB_HCA"),
    "RDMA switched off on two hosts": (
        line("node-a", 1000, "NCCL_IB_DISABLE set by environment to 1.") + job() + links("NET/Socket/0"), "slow", "ib-unused", "unset NCCL_IB_DISABLE"),
    "every rank of two hosts waits in the same collective": (
        job() + links("NET/IB/0/GDRDMA") + timeout(0, 900, size=4096) + timeout(1, 900, size=4096), "fail", "net-hang", "nccl-tests"),
    "a shard group within one host waits, although hosts are joined by InfiniBand": (
        job(per_host=2) + links("NET/IB/0/GDRDMA", pairs=((1, 2), (3, 0)), per_host=2) + links("P2P/CUMEM", pairs=((0, 1), (1, 0)), per_host=2)
        + timeout(0, 9, "_ALLGATHER_BASE", 64, "1(mesh_shard)", local=0) + timeout(1, 9, "_ALLGATHER_BASE", 64, "1(mesh_shard)", local=1), "fail", "p2p-hang", "ACS"),
    "only one rank's log": (
        "".join(s for s in job().splitlines(keepends=True) if s.startswith("node-b")) + timeout(1, 900), "fail", "timeout-unknown", "all ranks"),
    "ECC": (job(**ONE_HOST) + "[rank1]:[E ProcessGroupNCCL.cpp:1] [PG 3 Rank 1] x\nCUDA error: uncorrectable ECC error encountered\n" + died(1, -6, 1001), "fail", "gpu-fault", "dcgmi"),
    "illegal address": (
        "[rank1]: Traceback (most recent call last):\n[rank1]: RuntimeError: CUDA error: an illegal memory access was encountered\n" + died(1), "fail", "cuda-error", "CUDA_LAUNCH_BLOCKING"),
    "more ranks than GPUs": (
        "[rank2]: Traceback (most recent call last):\n[rank2]: RuntimeError: CUDA error: invalid device ordinal\n" + died(2), "fail", "invalid-device", "--nproc_per_node"),
    "the rendezvous port is taken": (
        "Traceback (most recent call last):\ntorch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, code: -98, EADDRINUSE\n",
        "fail", "port-in-use", "--standalone"),
    "the rendezvous is not reached": (
        "[rank1]: Traceback (most recent call last):\n[rank1]: torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (node-a, 29500).\n",
        "fail", "rendezvous-failed", "MASTER_ADDR"),
    "data loader in a small container": (
        "RuntimeError: DataLoader worker (pid 77) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory.\n" + died(0),
        "fail", "shm-too-small", "--shm-size"),
    "kernel's memory killer": (
        "Memory cgroup out of memory: Killed process 1001 (python) total-vm:9kB\n" + job(**ONE_HOST) + died(1, -9, 1001), "fail", "rank-killed", "dmesg"),
    "srun": ("srun: error: node-b: task 1: Killed\n" + job(), "fail", "rank-killed", "scheduler"),
    "mpirun": ("mpirun noticed that process rank 1 with PID 0 on node node-b exited on signal 11 (Segmentation fault).\n" + job(), "fail", "rank-crashed", "SIGBUS"),
    "collectives compared by PyTorch": (
        "[rank0]: Traceback (most recent call last):\n[rank0]: RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: CollectiveFingerPrint("
        "SequenceNumber=3, OpType=ALLREDUCE), but Rank 1 is running collective: CollectiveFingerPrint(SequenceNumber=3, OpType=ALLGATHER)\n", "fail", "desync", "same order"),
    "rank 0 never shared its id": (
        "[rank1]: Traceback (most recent call last):\n[rank1]: torch.distributed.DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d "
        "key-value store by key '0', but store->get('0') got error: Socket Timeout\n", "fail", "straggler", "last lines"),
    "NCCL_DEBUG unset: only PyTorch repeats the warning": (
        BACKEND_ERROR.replace("unhandled system error", "invalid usage") + "[rank0]: ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n[rank0]: Last error:\n"
        "[rank0]: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 60\n" + died(0), "fail", "duplicate-gpu", "LOCAL_RANK"),
    "NCCL_DEBUG unset and no reason given": (BACKEND_ERROR + died(0), "fail", "nccl-error", "NCCL_DEBUG=INFO"),
    "a handled error does not hide the real one": (
        job(**ONE_HOST) + "CUDA out of memory, trying micro-batch 4\n" + "step 1 ok\n" * 60 + "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "/w/x.py", line 8, in <module>\n[rank1]: ValueError: bad sample 12\n', "fail", "rank-raised", "x.py:8"),
    "a traceback that a reader printed long before the kill": (
        job(**ONE_HOST) + 'Traceback (most recent call last):\n  File "x.py", line 3, in get\nPIL.UnidentifiedImageError: cannot identify a.jpg\n' + "step 1 ok\n" * 60
        + died(1, -9, 1001), "fail", "rank-killed", "1. [fail] rank-killed"),
    "one chain of exceptions is one failure": (
        '[rank1]: Traceback (most recent call last):\n[rank1]:   File "/w/a.py", line 8, in <module>\n[rank1]: KeyError: \'x\'\n'
        "[rank1]: During handling of the above exception, another exception occurred:\n[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "/w/a.py", line 18, in <module>\n[rank1]: RuntimeError: sample 12 broken\n', "fail", "rank-raised", "KeyError: 'x' (a.py:8); then"),
    "the log begins after the traceback's head": ("[rank0]: RuntimeError: NCCL Error 2: unhandled system error\n", "fail", "nccl-error", "NCCL_DEBUG=INFO"),
    "SIGSEGV under torchrun": (job(**ONE_HOST) + died(1, -11, 1001), "fail", "rank-crashed", "signal 11"),
    "SIGABRT and no reason": (job(**ONE_HOST) + died(1, -6, 1001), "fail", "rank-crashed", "exit code -6"),
    "Slurm's memory limit": (
        job() + "slurmstepd: error: Detected 1 oom_kill event in StepId=77.0. Some of the step tasks have been OOM Killed.\n"
        "srun: error: node-b: task 1: Out Of Memory\n", "fail", "rank-killed", "rank 1"),
    "2.30 completion, after a kill under srun -l": (
        "".join(f"{int('node-b' in text)}: {text}\n" for text in job().splitlines()) + "srun: error: node-b: task 1: Killed\n"
        + "0: " + warn("node-a", 1000, "NET/IB: Got completion from peer 192.0.2.12<4> with status=IBV_WC_RETRY_EXC_ERR(12) vendor_err=129", "net_ib/p2p.cc:1 (x)").strip() + "\n",
        "fail", "rank-killed", "scheduler"),
    "one pod per host, both on the container network": (
        "".join(f"[pod/t-{int('node-b' in text)}/main] 2026-03-10T09:14:02.118Z {text}\n"
                for text in job(complete=False, interface="cni0", address="10.244.0.1").splitlines()), "fail", "wrong-interface", "cni0"),
    "2.30 wording of a full /dev/shm": (
        job(**ONE_HOST, complete=False) + warn("node-a", 1000, "Error: failed to extend /dev/shm/nccl-aa to 33030532 bytes, error: No space left on device (28)",
                                               "misc/shmutils.cc:87 (ncclShmOpen)"), "fail", "shm-too-small", "--shm-size"),
    "a shard group of HSDP differs": (
        job(per_host=4) + timeout(4, 30, "_ALLGATHER_BASE", 64, "1(mesh_shard)", local=0) + timeout(5, 30, "_REDUCE_SCATTER_BASE", 64, "1(mesh_shard)", local=1),
        "fail", "desync", "rank 5 in _REDUCE_SCATTER_BASE"),
    "out of memory behind torchrun --tee": (
        "".join(f"[default3]:{text}\n" for text in ("[rank3]: Traceback (most recent call last):", '[rank3]:   File "/w/x.py", line 9, in <module>',
                                                    "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."))
        + "".join(f"[default{r}]:{text}\n" for r in (0, 1, 2) for text in timeout(r, 50).splitlines()), "fail", "out-of-memory", "rank 3"),
    "gloo is given an interface that does not exist": (
        "error: rank 1, start: the first gloo all-reduce of 2 ranks failed ([enforce fail at gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: "
        "nosuch)\n" + died(0), "fail", "no-interface", "GLOO_SOCKET_IFNAME"),
    "this project's first collective fails": (
        "error: rank 1, start: the first nccl all-reduce of 2 ranks failed (unknown)\n" + died(0), "fail", "init-incomplete", "tools/doctor.py"),
    "this project's own line about a killed rank is no second cause": (
        "error: step 6: rank 1 died without a word (killed? out of host memory? see dmesg)\n" + died(1, -9), "fail", "rank-killed", "rank 1, exit code -9"),
    "this project's own one-line error": ("error: --global-batch 30 cannot be split\n" + died(0, 2), "fail", "rank-raised", "fix that error"),
}
# fmt: on


@pytest.mark.parametrize("name", CASES)
def test_composed_case(name):
    text, verdict, code, word = CASES[name]
    result = diagnose(text)
    assert (result["verdict"], first(result)["code"]) == (verdict, code), result["report"]
    assert word in result["report"]


# fmt: off
HEALTHY = {
    "two hosts over RDMA with GPUDirect": job() + links("NET/IB/0/GDRDMA"),
    "two hosts over TCP, nothing else there": line("node-a", 1000, "NET/IB : No device found.") + job() + links("NET/Socket/0"),
    "AWS": job() + links("NET/AWS Libfabric/0/GDRDMA"),
    "loopback on one host": job(**ONE_HOST, interface="lo", address="127.0.0.1") + links("P2P/CUMEM", **LOCAL),
    "docker0 on one host": job(**ONE_HOST, interface="docker0", address="172.17.0.2") + links("P2P/IPC", **LOCAL),
    "RDMA switched off on one host": line("node-a", 1000, "NCCL_IB_DISABLE set by environment to 1.") + job(**ONE_HOST) + links("P2P/CUMEM", **LOCAL),
    "P2P switch set to 0": line("node-a", 1000, "NCCL_P2P_DISABLE set by environment to 0.") + job(**ONE_HOST) + links("P2P/CUMEM", **LOCAL),
    "a few retries before the peer listened": line("node-b", 2000, "socketPollConnect: connect returned Connection refused, retrying (2/34) after sleep for 200 msec") + job(),
    "teardown": job(**ONE_HOST) + line("node-a", 1000, "[Service thread] Connection closed by localRank 1") + line("node-a", 1000, "misc/socket.cc:64 -> 3")
    + line("node-a", 1000, "comm 0x10 rank 0 nranks 2 cudaDev 0 busId 1000 - Abort COMPLETE"),
    "a caught exception that a worker printed": job(**ONE_HOST) + "Traceback (most recent call last):\n  File \"x.py\", line 3, in get\nPIL.UnidentifiedImageError: cannot identify a.jpg\n"
    + "step 1 ok\n" * 200,
    "progress bars": job(**ONE_HOST) + "".join(f"\r{p}%|###  | {p}/100 [00:01<00:02]" for p in range(0, 100, 10)) + "\n",
    "words that sound bad": job(**ONE_HOST) + "INFO 0 Errors, memory 12 GiB, kill switch off, signal to noise 3.1, collective mean\n",
    "a tool's error line": job(**ONE_HOST) + "error: externally-managed-environment\nstep 1 ok\n",
    "PyTorch's own harmless warnings": job(**ONE_HOST)
    + "[W socket.cpp:697] [c10d] The client socket has failed to connect to [node-a]:29500 (errno: 97 - Address family not supported by protocol).\n"
    "[rank0]:[W1130 22:44:56.2 ProcessGroupNCCL.cpp:4561] [PG ID 0 PG GUID 0 Rank 0]  using GPU 0 to perform barrier as devices used by this process are currently "
    "unknown. This can potentially cause a hang if this rank to GPU mapping is incorrect.\n"
    "[rank0]:[W1130 ProcessGroupNCCL.cpp:1250] Warning: WARNING: process group has NOT been destroyed before we destruct ProcessGroupNCCL.\n"
    "[rank1]:[W1130 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=62, remote=[localhost]:29500): Connection reset by peer\n",
    "an out-of-memory that the program handled": job(**ONE_HOST) + "torch.OutOfMemoryError: CUDA out of memory. Tried 3 GiB; trying micro-batch 4\n" + "step 1 ok\n" * 60,
    "NVLS absent": job(**ONE_HOST) + line("node-a", 1000, "NVLS multicast support is not available on dev 0 (NVLS_NCHANNELS 0)") + links("P2P/CUMEM", **LOCAL),
    "2.30 with time stamps on every line": "".join(f"[2026-03-10 09:14:02.{n:03}] {text}\n" for n, text in enumerate(
        (job(**ONE_HOST, version="2.30.7").replace("ncclCommInit", "[Rank 0] ncclCommInit") + links("P2P/CUMEM", **LOCAL)).splitlines())),
    "gloo on a CPU": "W1130 22:44:56.2 3620 torch/distributed/run.py:874] Setting OMP_NUM_THREADS environment variable\nstep 1 ok\n",
    "2.14": "node-a:1:20 [0] NCCL INFO Bootstrap : Using eth0:192.0.2.1<0>\nNCCL version 2.14.3+cuda11.7\n"
    "node-a:1:20 [0] NCCL INFO Channel 00/0 : 0[1000] -> 1[2000] via P2P/IPC/read\nnode-a:2:21 [1] NCCL INFO Channel 00/0 : 1[2000] -> 0[1000] via P2P/IPC/read\n"
    "node-a:1:20 [0] NCCL INFO comm 0x7f rank 0 nranks 2 cudaDev 0 busId 1000 - Init COMPLETE\nnode-a:2:21 [1] NCCL INFO comm 0x8f rank 1 nranks 2 cudaDev 1 busId 2000 - Init COMPLETE\n",
}
# fmt: on


@pytest.mark.parametrize("name", HEALTHY)
def test_no_false_alarm(name):
    result = diagnose(HEALTHY[name])
    assert result["verdict"] == "ok" and result["findings"] == [], result["report"]


def test_a_log_that_ends_early_is_not_called_a_failure():
    for name in ("ok", "00_healthy_8xh100"):
        text = text_of(name)
        for end in range(500, len(text), 1500):
            assert diagnose(text[:end])["verdict"] == "ok", f"{name} cut at {end}"


# --- many communicators -----------------------------------------------------------------------------------------------
def comm(host, pid, rank, size, local, pointer, ident):
    text = f"ncclCommInitRankConfig comm {pointer} rank {rank} nranks {size} cudaDev {local} nvmlDev {local} busId {local + 1}000 commId {ident} - Init"
    return line(host, pid, text + " START", local), line(host, pid, text + " COMPLETE", local)


def test_links_of_subgroups_are_told_in_ranks_of_the_job():
    """HSDP on 2 hosts x 2 GPUs: shard groups within a host, replicate groups across hosts, all numbered 0 and 1."""
    text = job(per_host=2)
    for rank in range(4):
        node, local = divmod(rank, 2)
        host, pid = ("node-a", "node-b")[node], 1000 * (node + 1) + local
        text += "".join(comm(host, pid, local, 2, local, f"0x{rank}a", f"0x5{node}")) + "".join(
            comm(host, pid, node, 2, local, f"0x{rank}b", f"0x6{local}")
        )
        text += line(host, pid, f"Channel 00/0 : {local}[{local}] -> {1 - local}[{1 - local}] via P2P/CUMEM", local)
        text += line(
            host, pid, f"Channel 00/0 : {node}[{local}] -> {1 - node}[{local}] [send] via NET/IB/0/GDRDMA", local
        )
    result = diagnose(text)
    pairs = {(k["from"], k["to"]): k["transport"] for k in result["links"]}
    assert pairs == {
        (0, 1): "P2P/CUMEM",
        (1, 0): "P2P/CUMEM",
        (2, 3): "P2P/CUMEM",
        (3, 2): "P2P/CUMEM",
        (0, 2): "NET/IB/GDRDMA",
        (2, 0): "NET/IB/GDRDMA",
        (1, 3): "NET/IB/GDRDMA",
        (3, 1): "NET/IB/GDRDMA",
    }
    assert result["ranks"] == 4 and result["verdict"] == "ok"


def test_timeouts_of_two_groups_of_one_number_are_not_compared():
    text = job(per_host=2)
    text += timeout(0, 40, "_ALLGATHER_BASE", 64, "1(mesh_shard)", local=0) + timeout(
        2, 40, "_REDUCE_SCATTER_BASE", 64, "1(mesh_shard)", local=0
    )
    assert first(diagnose(text))["code"] == "timeout-unknown"


def test_a_send_and_its_receive_are_no_contradiction():
    result = diagnose(
        job(**ONE_HOST) + links("P2P/CUMEM", **LOCAL) + timeout(0, 9, "SEND", 64) + timeout(1, 9, "RECV", 64)
    )
    assert first(result)["code"] == "p2p-hang"


def test_pipeline_pairs_without_a_communicator_of_all_ranks():
    text = "".join(
        "".join(comm("node-a", 100 + rank, rank % 2, 2, rank, f"0x{rank}c", f"0x7{rank // 2}")) for rank in range(4)
    )
    text += line("node-a", 102, "Channel 00/1 : 0[2] -> 1[3] via P2P/CUMEM", 2)
    result = diagnose(text)
    assert result["ranks"] == 4 and [(k["from"], k["to"]) for k in result["links"]] == [(2, 3)]
    assert "no communicator spans all ranks" in result["report"]


def test_the_launchers_own_sigkill_is_not_the_cause():
    text = (
        "[rank1]: Traceback (most recent call last):\n[rank1]: ValueError: bad sample 12\n"
        + died(1, 1, 1001)
        + "W api.py:1012] Unable to shutdown process 1000 via Signals.SIGTERM, forcefully exiting via Signals.SIGKILL\n"
        "Failures:\n[1]:\n  host      : node-a\n  rank      : 0 (local_rank: 0)\n  exitcode  : -9 (pid: 1000)\n"
        "Root Cause (first observed failure):\n[0]:\n  host      : node-a\n  rank      : 1 (local_rank: 1)\n  exitcode  : 1 (pid: 1001)\n"
    )
    result = diagnose(text)
    assert (
        codes(result) == [("rank-raised", "fail")]
        and first(result)["ranks"] == [1]
        and "bad sample 12" in first(result)["cause"]
    )


def test_several_killed_ranks_are_one_finding():
    result = diagnose(job(hosts=("node-a",), per_host=4) + died(1, -9, 1001) + died(3, -9, 1003))
    assert codes(result) == [("rank-killed", "fail")] and first(result)["ranks"] == [1, 3]


def test_a_generous_p2p_level_is_not_blamed():
    text = (
        line("node-a", 1000, "NCCL_P2P_LEVEL set by environment to SYS")
        + job(**ONE_HOST)
        + links("SHM/direct/direct", **LOCAL)
    )
    assert first(diagnose(text))["code"] == "p2p-unavailable"


GLOO = "/x/site-packages/torch/distributed/distributed_c10d.py"


def gloo(rank, call, error):
    return (
        f'[rank{rank}]: Traceback (most recent call last):\n[rank{rank}]:   File "/w/ddp_train.py", line 7, in main\n[rank{rank}]:     dist.{call}(x)\n'
        f'[rank{rank}]:   File "{GLOO}", line 3252, in {call}\n[rank{rank}]:     work.wait()\n[rank{rank}]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/x.cc:1] {error}\n'
    )


def summary(*exits):
    return "Failures:\n" + "".join(
        f"[{i}]:\n  host      : localhost\n  rank      : {r} (local_rank: {r})\n  exitcode  : {c} (pid: {50 + r})\n"
        for i, (r, c) in enumerate(exits)
    )


def test_gloo_the_rank_that_raised_leads_and_the_closed_connection_follows():
    text = (
        gloo(0, "all_reduce", "Connection closed by peer [127.0.0.1]:1")
        + "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "/w/ddp_train.py", line 8, in <module>\n[rank1]: ValueError: bad sample 12\n'
        + died(1, 1, 51)
        + summary((0, -15))
    )
    result = diagnose(text)
    assert codes(result) == [("rank-raised", "fail")] and first(result)["ranks"] == [1]
    assert "ddp_train.py:8" in first(result)["cause"] and result["consequences"]["closed connection"] == 1


def test_gloo_timeouts_name_the_late_rank_or_the_differing_calls():
    late = diagnose(
        gloo(0, "all_reduce", "Timed out waiting 8000ms for recv operation to complete")
        + died(0, 1, 50)
        + summary((1, -15))
    )
    assert first(late)["code"] == "straggler" and first(late)["ranks"] == [1]
    differ = diagnose(
        gloo(0, "all_reduce", "Timed out waiting 8000ms for recv operation to complete")
        + gloo(1, "all_gather", "Timed out waiting 8000ms for send operation to complete")
        + died(0, 1, 50)
    )
    assert first(differ)["code"] == "desync" and "all_gather" in first(differ)["cause"]


def test_only_closed_connections_say_that_the_peers_log_is_missing():
    assert first(diagnose(gloo(0, "all_reduce", "Connection closed by peer [127.0.0.1]:1")))["code"] == "peer-lost"


def test_exit_without_traceback_is_named():
    result = diagnose(
        gloo(0, "all_reduce", "Connection closed by peer [127.0.0.1]:1") + died(1, 3, 51) + summary((0, -15))
    )
    assert (
        first(result)["code"] == "rank-raised"
        and first(result)["ranks"] == [1]
        and "exit code 3" in first(result)["cause"]
    )


def test_stopped_from_outside_is_a_note():
    result = diagnose(
        "W1130 21:14:00.4 830 torch/distributed/elastic/agent/server/api.py:739] Received 15 death signal, shutting down workers\n"
        + job(**ONE_HOST)
    )
    assert result["verdict"] == "ok" and codes(result) == [("stopped", "note")]


# --- the flight recorder ----------------------------------------------------------------------------------------------
def entry(seq, op="all_reduce", size=10, state="completed", p2p=False, record=None):
    return {
        "record_id": seq if record is None else record,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": seq,
        "p2p_seq_id": seq if p2p else 0,
        "profiling_name": f"nccl:{op}",
        "input_sizes": [[size]],
        "output_sizes": [[size]],
        "state": state,
        "is_p2p": p2p,
        "time_created_ns": seq,
        "frames": [{"name": "main", "filename": "/w/fsdp_train.py", "line": 40}],
    }


def dump(rank, entries, ranks="[0, 1]", as_json=False):
    data = {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}},
        "pg_status": {},
        "entries": entries,
    }
    return f"/tmp/nccl_trace_rank_{rank}", json.dumps(data).encode() if as_json else pickle.dumps(data, protocol=2)


@pytest.mark.parametrize("as_json", [False, True])
def test_recorder_finds_the_kind_of_mismatch(as_json):
    same = [entry(1), entry(2)]
    stuck = entry(3, state="started")

    def read(a, b):
        return first(diagnose(dump(0, a, as_json=as_json), dump(1, b, as_json=as_json)))

    assert read(same, same)["code"] is None
    other_op = read([*same, stuck], [*same, entry(3, "_all_gather_base", state="scheduled")])
    assert (
        other_op["code"] == "desync" and "_ALL_GATHER_BASE" in other_op["cause"] and "collective 3" in other_op["cause"]
    )
    other_size = read([*same, stuck], [*same, entry(3, size=11, state="started")])
    assert other_size["code"] == "desync" and "11" in other_size["cause"]
    missing = read([*same, stuck], same)
    assert missing["code"] == "straggler" and missing["ranks"] == [1] and missing["lines"][0]["file"].endswith("_0")
    assert read([*same, stuck], [*same, stuck])["code"] == "timeout-unknown"


def test_recorder_and_log_are_joined():
    stuck = [entry(1, state="started")]
    result = diagnose(job(**ONE_HOST) + links("P2P/CUMEM", **LOCAL), dump(0, stuck), dump(1, stuck))
    assert first(result)["code"] == "p2p-hang" and first(result)["ranks"] == [0, 1]


def test_recorder_finds_a_send_nobody_receives():
    sends = [entry(1, "send 0->1", p2p=True, record=0), entry(1, "send 0->1", p2p=True, record=1, state="started")]
    result = diagnose(dump(0, sends), dump(1, [entry(1, "recv 1<-0", p2p=True, record=0)]))
    assert (
        first(result)["code"] == "straggler"
        and first(result)["ranks"] == [1]
        and "posted 1 recv" in first(result)["cause"]
    )


def test_a_damaged_dump_does_not_hide_the_others():
    good = [dump(0, [entry(1, state="started")]), dump(1, [entry(1, "all_gather", state="started")])]
    cut = pickle.dumps({"entries": []})[:-3]
    result = diagnose(*good, ("trace_rank_2", cut), ("trace_rank_3", b'{"entries": 7}'))
    assert first(result)["code"] == "desync" and ("dump-refused", "note") in codes(result)


def test_a_log_that_begins_like_a_pickle_is_still_read():
    result = diagnose(("x", b"\x80\x04 junk\n" + text_of("kill").encode()))
    assert first(result)["code"] == "rank-killed"


def test_recorder_tells_the_version_of_nccl():
    data = json.dumps({"entries": [entry(1)], "pg_config": {}, "nccl_version": "2.28.9"}).encode()
    assert diagnose(("rank_0.json", data))["nccl"] == ["2.28.9"]


def test_recorder_refuses_anything_but_plain_containers(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/owned",)

    path = tmp_path / "trace_rank_0"
    path.write_bytes(pickle.dumps({"entries": [Evil()]}))
    done = run(str(path))
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert "system" in done.stderr and not (tmp_path / "owned").exists()
    path.write_bytes(pickle.dumps({"entries": []})[:-3])
    assert run(str(path)).returncode == 2


# --- whatever comes ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(6))
def test_damaged_logs_never_crash_it(seed):
    rng = random.Random(seed)
    for name in LOGS:
        data = bytearray(text_of(name).encode())
        lines = data.split(b"\n")
        kind = rng.randrange(5)
        if kind == 0:
            rng.shuffle(lines)
            data = b"\n".join(lines)
        elif kind == 1:
            data = b"".join(part if rng.random() < 0.3 else part + b"\n" for part in lines)
        elif kind == 2:
            for _ in range(200):
                data[rng.randrange(len(data))] = rng.randrange(256)
        elif kind == 3:
            at = rng.randrange(len(data))
            data = data[at:] + rng.randbytes(3000) + data[:at]
        else:
            data = b"\n".join(part[rng.randrange(len(part) + 1) :] for part in lines)
        result = diagnose(("x", bytes(data)))
        assert result["verdict"] in ("ok", "slow", "fail") and result["report"]


def test_huge_lines_stay_bounded():
    started = time.monotonic()
    glued = ("node-a:613:613 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM" * 16000).encode()
    for line_of_a_megabyte in (
        b"x" * (1 << 20),
        b"a.b-c" * (1 << 18),
        b"Error " * (1 << 18),
        glued,
        b"\r50%|" * (1 << 18),
        b"[" * (1 << 20) + b" NCCL INFO x",
        b"comm 0x1 rank 0 nranks " + b"9" * (1 << 20) + b" NCCL WARN 1:2:3",
    ):
        result = diagnose(("x", text_of("kill").encode() + line_of_a_megabyte + b"\n" + line_of_a_megabyte))
        assert first(result)["code"] == "rank-killed" and len(result["report"]) < 20000
    assert time.monotonic() - started < 15


def test_evidence_survives_a_block_boundary():
    """Files are read in blocks of 1 MB; a traceback that straddles two of them is still one."""
    tail = '[rank1]: Traceback (most recent call last):\n[rank1]:   File "/w/x.py", line 8, in <module>\n[rank1]: ValueError: bad sample 12\n'
    for shift in range(0, 140, 7):
        filler = "step 1 loss 0.1\n" * (65536 + 256) + "." * shift + "\n"
        filler = filler[-((1 << 20) + 4096 - 40 - shift) :]
        result = diagnose(filler + tail)
        assert first(result)["code"] == "rank-raised", shift
        assert result["findings"][0]["lines"][0]["line"] == filler.count("\n") + 3


def test_a_line_that_differs_in_its_numbers_only_is_read_once(monkeypatch):
    read, whole = [], nccl_log.feed
    monkeypatch.setattr(nccl_log, "feed", lambda log, text, *more: read.append(text) or whole(log, text, *more))
    steps = "".join(f"[rank{n % 2}]: step {n}: loss 0.{n:04}, memory 41 GiB\n" for n in range(1000, 3000))
    result = diagnose(steps + "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n")
    assert len(read) == 3, "one for each rank, and the error"
    assert codes(result) == [("out-of-memory", "fail")] and result["ranks"] == 2


def test_what_is_dull_elsewhere_ends_a_traceback():
    """The same words say nothing alone and everything below a traceback, which a stranger's lines may interrupt."""
    trace = 'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n    work()\n'
    alone, between = "OddError: number 1 was odd\n", "step 1: loss 0.5\n" * 2 * nccl_log.FORCED
    result = diagnose(alone * 3 + trace + between + "OddError: number 7 was odd\n")
    assert codes(result) == [("rank-raised", "fail")] and "number 7 was odd" in result["findings"][0]["cause"]


@pytest.mark.parametrize("path", sorted((HERE / "nccl").glob("*.log")), ids=lambda path: path.stem)
def test_passing_over_dull_lines_changes_nothing(path, monkeypatch):
    noise = [b"step %d: memory 3 GiB\n", b"[rank1]: error %d, again\n", b"OddError: %d\n", b"host      : h%d\n",
             b"[rank0]:[I1207 08:00:01 x.cpp:1] [PG ID 0 PG GUID 0(default_pg) Rank 0] finish %d\n", b"\r %d%%|## |"]  # fmt: skip
    lines = path.read_bytes().splitlines(keepends=True)
    mixed = b"".join(noise[n % len(noise)] % n + line for n, line in enumerate(lines))
    quick = diagnose(("a.log", mixed))
    monkeypatch.setattr(nccl_log, "shape_of", lambda raw: b"")
    assert quick == diagnose(("a.log", mixed))


def test_of_a_progress_bar_the_last_state_counts():
    text = "".join(f"\r train: {n % 101:3d}%|{'#' * (n % 7)}| {n}/900" for n in range(900))
    log = nccl_log.Log()
    nccl_log.read(log, io.BytesIO(text.encode()), "a.log")
    assert [bar.raw for bar in log.bars.values()] == [" train:  91%|###| 899/900"]


def test_a_link_over_the_network_is_read_again_for_another_communicator():
    """The same line, word for word, may then join two other ranks."""
    line = "h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0\n"
    log = nccl_log.Log()
    for name in ("0xa", "0xb"):
        start = f"h:1:2 [0] NCCL INFO ncclCommInitRank comm {name} rank 0 nranks 2 cudaDev 0 busId 1000 commId {name} - Init START\n"
        nccl_log.read(log, io.BytesIO((start + line * 3).encode()), "a.log")
    assert [key[1] for key in log.links] == [("id", "0xa", 2), ("id", "0xb", 2)]


def test_twenty_megabytes_take_seconds():
    text = (text_of("ok") + "[rank 0] step 1 loss 0.1234 img/s 92.4\n" * 3000).encode()
    data = text * (20_000_000 // len(text))
    started = time.process_time()
    diagnose(("x", data))
    assert time.process_time() - started < 6


# --- the command line -------------------------------------------------------------------------------------------------
def run(*arguments, stdin=b""):
    done = subprocess.run([sys.executable, str(TOOL), *arguments], input=stdin, capture_output=True, timeout=60)
    done.stdout, done.stderr = done.stdout.decode(), done.stderr.decode()
    return done


def test_exit_codes_and_standard_input(tmp_path):
    path = {name: str(HERE / "nccl" / f"{name}.log") for name in LOGS}
    assert run(path["ok"]).returncode == 0
    assert run(path["04_consumer_gpus_no_p2p"]).returncode == 0
    failed = run("--json", path["oom"], path["ok"])
    assert failed.returncode == 1 and json.loads(failed.stdout)["findings"][0]["lines"][0]["file"] == path["oom"]
    assert run("-", stdin=text_of("kill").encode()).returncode == 1
    nothing = run("-", stdin=b"step 1 loss 0.1\n")
    assert nothing.returncode == 2 and nothing.stderr.startswith("error: ")
    assert run("-", stdin=b"").returncode == 2
    missing = run(str(tmp_path / "none.log"))
    assert missing.returncode == 2 and "none.log" in missing.stderr and missing.stderr.count("\n") == 1
    assert run().returncode == 2


def test_json_has_the_promised_shape():
    result = json.loads(run("--json", str(HERE / "nccl" / "kill.log")).stdout)
    assert {"verdict", "nccl", "hosts", "ranks", "links", "findings"} <= set(result)
    assert all({"from", "to", "transport", "channels"} == set(link) for link in result["links"])
    assert all({"code", "severity", "cause", "fix", "ranks", "lines"} == set(one) for one in result["findings"])


def test_every_code_is_explained():
    text = run("--codes").stdout
    contract = (
        "shm-too-small wrong-interface loopback-interface no-interface unreachable-peer mixed-nccl duplicate-gpu p2p-unavailable p2p-disabled-by-user "
        "shm-disabled-by-user p2p-hang ib-without-gdr ib-unused roce-gid memlock cumem-host nvls-fabric same-host-over-net out-of-memory rank-killed "
        "rank-raised desync straggler rank0-busy timeout-unknown spliced-log"
    ).split()
    assert not [code for code in [*contract, *nccl_log.RULES] if not re.search(rf"(?m)^{code}\s", text)]
    used = set(re.findall(r'(?:finding|hit)\(\s*"([\w-]+)"', TOOL.read_text())) - {"watchdog"}
    assert used <= set(nccl_log.RULES)


def test_it_is_one_file_of_the_standard_library():
    imports = [node for node in ast.walk(ast.parse(TOOL.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {
        name
        for node in imports
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
    }
    assert names <= set(sys.stdlib_module_names)


def test_the_chapter_names_lines_that_the_script_has():
    """docs/nccl.md explains `# comm:` lines of fsdp_train.py by their text."""
    chapter, script = ((HERE.parent / name).read_text() for name in ("docs/nccl.md", "fsdp_train.py"))
    spoken = [text for text in script.splitlines() if "# comm:" in text]
    quoted = re.findall(r"(?m)^\| `(.+?)` \|", chapter.split("## Which line of the script")[1])
    assert len(quoted) > 10
    assert not [quote for quote in quoted if not any(quote in text for text in spoken)]
