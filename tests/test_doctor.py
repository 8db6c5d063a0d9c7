"""tools/doctor.py: what it reads, how it judges, and two runs on two ranks without GPUs."""

import copy
import json
import os
import sys
import threading
import time

import pytest
import torch.distributed as dist

from tests.launch import end, start
from tools import doctor
from tools.doctor import GIB, MIB


# ── what programs and the kernel print ───────────────────────────────────────────────────────────────────────────────
def test_gpus_and_the_programs_on_them_are_read_from_nvidia_smi():
    text = "0, GPU-aa, NVIDIA H200, 143771, 4, 580.82\n1, GPU-bb, NVIDIA H200, 143771, [N/A], 580.82\nNo devices\n"
    first, second = doctor.parse_gpus(text)
    assert first == {
        "index": "0",
        "uuid": "GPU-aa",
        "name": "NVIDIA H200",
        "total": 143771,
        "used": 4,
        "driver": "580.82",
    }
    assert second["used"] == 0
    rows = doctor.parse_programs("GPU-aa, 812, python a,b.py, 1024\n")
    assert rows == [["GPU-aa", "812", "python a,b.py", 1024]]


def test_the_topology_matrix_is_read_with_its_underlined_head():
    text = (
        "\x1b[4m\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
        "GPU0\t X \tNV18\tPIX\t0-47\t0\nGPU1\tNV18\t X \tSYS\t48-95\t1\nNIC0\tPIX\tSYS\t X\n\nLegend:\n  X    = Self\n"
    )
    assert doctor.parse_topology(text) == {"0 1": "NV18", "1 0": "NV18"}
    assert doctor.parse_topology("") == {}


@pytest.mark.parametrize(
    "text, state",
    [
        ("    Fabric\n        State                 : Completed\n        Status : Success\n", "Completed"),
        ("    Fabric\n        State   : Completed\n    Fabric\n        State   : In Progress\n", "In Progress"),
        ("    Fabric\n        State   : N/A\n", "Completed"),
        ("no such section", ""),
    ],
)
def test_the_state_of_the_fabric_is_the_worst(text, state):
    assert doctor.fabric_state(text) == state


def test_configuration_files_of_nccl():
    assert doctor.parse_conf(
        "# all\nNCCL_DEBUG=WARN\n NCCL_IB_HCA = =mlx5_0 # card\nnothing\n#NCCL_P2P_DISABLE=1\n"
    ) == {
        "NCCL_DEBUG": "WARN",
        "NCCL_IB_HCA": "=mlx5_0",
    }


def test_files_under_proc():
    six = (
        "20010db8000000000000000000000001 02 40 00 80     eth0\nfe800000000000000000000000000001 02 40 20 80     eth1\n"
    )
    assert doctor.parse_if_inet6(six) == {"eth0": "2001:0db8:0000:0000:0000:0000:0000:0001"}
    assert doctor.parse_memory("MemTotal: 9 kB\nMemAvailable:    2048 kB\n", "max\n") == 2048 * 1024
    assert doctor.parse_memory("MemAvailable:    2048 kB\n", "1000\n") == 1000
    row = "7f0-7f1 r-xp 00000000 08:01 12345     "
    maps = "\n".join(
        row + path for path in ("/a/lib/libnccl.so.2", "/a/libnccl-net.so", "/a/lib/libnccl.so.2", "/a/libc.so")
    )
    assert doctor.mapped_nccl(maps) == ["/a/lib/libnccl.so.2"]  # network plugins are no second NCCL


def test_bridges_that_redirect_are_found():
    text = (
        "00:01.0 PCI bridge: Root Port\n\tACSCtl: SrcValid+ TransBlk- ReqRedir+ CmpltRedir+\n"
        "00:02.0 PCI bridge: Root Port\n\tACSCtl: SrcValid- TransBlk- ReqRedir- CmpltRedir-\n"
        "01:00.0 3D controller: GPU\n\tACSCtl: ReqRedir+\n"
    )
    assert doctor.acs_bridges(text) == ["00:01.0"]


@pytest.mark.parametrize(
    "names, setting, chosen",
    [
        (["lo", "docker0", "eth0", "ib0"], "", ["ib0"]),
        (["lo", "docker0", "eth0"], "", ["eth0"]),
        (["lo", "docker0"], "", ["docker0"]),
        (["lo"], "", ["lo"]),
        (["lo", "eth0", "eth1"], "eth", ["eth0", "eth1"]),
        (["eth1", "eth10"], "=eth1", ["eth1"]),
        (["lo", "docker0", "eth0"], "^docker0", ["lo", "eth0"]),
        (["lo", "eth0"], "ens", []),
    ],
)
def test_the_interface_that_nccl_takes(names, setting, chosen):
    assert doctor.nccl_interfaces(names, setting) == chosen


def test_gloo_takes_the_address_of_the_hosts_name():
    network = {"interfaces": [["lo", "127.0.0.1", True], ["eth0", "192.0.2.7", True]], "resolved": ["192.0.2.7"]}
    assert doctor.chosen_interfaces(network, {}, gpu=False) == [("eth0", "192.0.2.7")]
    assert doctor.chosen_interfaces(network | {"resolved": []}, {}, gpu=False) == [("lo", "127.0.0.1")]
    assert doctor.chosen_interfaces(network, {"GLOO_SOCKET_IFNAME": ("eth9", "environment")}, gpu=False) == []


# ── judging ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def facts_of(rank, node):
    """Rank `rank` of 2 hosts with one H200 each."""
    gpu = {"index": "0", "uuid": f"GPU-{node}", "name": "H200", "total": 140000, "used": 4, "driver": "580.82"}
    return {
        "node": node,
        "local_rank": 0,
        "local_world_size": 1,
        "software": {"Python": "3.12.3", "torch": "2.13.0", "CUDA": "13.0", "NCCL": "2.28.9", "loaded": ["/v/libnccl.so.2"], "waiting": []},
        "gpus": {"cuda": True, "hidden": False, "visible": 1, "mine": str(node)},
        "nvidia-smi": {"listed": [gpu], "programs": [], "topology": {}, "fabric": ""},
        "limits": {"shm": 8 * GIB, "shm_free": 8 * GIB, "memlock": -1, "nofile": 65536, "container": ""},
        "settings": {},
        "network": {
            "host": f"node-{node}",
            "resolved": [f"192.0.2.{node}"],
            "interfaces": [["lo", "127.0.0.1", True], ["eth0", f"192.0.2.{node}", True]],
            "rdma": [["mlx5_0/1", "4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand"]],
        },
        "machine": {"cores": 16, "threads": 1, "local_world_size": 1, "memory": 64 * GIB, "kernel": "", "iommu": 0, "acs": [],
                    "peermem": True, "open_driver": False},
        "disk": {"folder": "/runs", "free": 500 * GIB, "writable": True},
    }  # fmt: skip


def later_of(rank):
    rows = [
        {"operation": operation, "bytes": 256 * MIB, "seconds": 0.01, "right": True}
        for operation in ("all-reduce", "all-gather", "send/recv")
    ]
    reach = {str(node): {"skew": 0.0, "rtt": 0.001, "address": f"192.0.2.{node}"} for node in (0, 1)}
    return {"reach": reach, "collectives": {"backend": "nccl", "rows": rows, "log": ""}}


def judged(change=lambda facts, later: None):
    facts, later = {rank: facts_of(rank, rank) for rank in (0, 1)}, {rank: later_of(rank) for rank in (0, 1)}
    facts, later = copy.deepcopy((facts, later))
    change(facts, later)
    return doctor.judge(facts, later, 2, wanted=10)[0]


def test_two_good_hosts_are_fit():
    results = judged()
    assert {one.state for one in results} == {"ok"}, results
    assert {"software", "gpus", "/dev/shm", "interface", "RDMA", "cores", "disk", "reach", "clock", "collectives"} <= {
        one.check for one in results
    }


def put(part, **values):
    return lambda facts, later: facts[1][part].update(values)


def report(**values):
    return lambda facts, later: later[1].update(values)


def row_is_wrong(facts, later):
    later[1]["collectives"]["rows"][1]["right"] = False


def settings_on_both(name, value):
    return lambda facts, later: [fact["settings"].update({name: (value, "environment")}) for fact in facts.values()]


BROKEN = [  # what is changed on host 1, the check that sees it, its state, a word of what it says, a word of the fix
    (put("software", torch="2.11.0"), "software", "fail", "torch 2.13.0 on rank 0, 2.11.0 on rank 1", "same wheels"),
    (put("software", NCCL="2.27.5"), "software", "fail", "2.27.5 on rank 1", "image"),
    (put("software", Python="3.11.7"), "software", "note", "3.11.7 on rank 1", ""),
    (put("software", loaded=["/v/libnccl.so.2", "/usr/lib/libnccl.so.2"]), "libnccl", "fail", "/usr/lib", "LD_PRELOAD"),
    (put("software", waiting=["/usr/lib/libnccl.so.2"]), "libnccl", "note", "/usr/lib", "LD_LIBRARY_PATH"),
    (put("gpus", mine=None, visible=0), "gpus", "fail", "none left for rank 1", "--nproc_per_node"),
    (lambda facts, later: facts[1].update(node=0) or facts[1]["gpus"].update(mine="0"), "gpus", "fail", "ranks share", "LOCAL_RANK"),
    (lambda facts, later: facts[1]["nvidia-smi"]["listed"][0].update(used=90000), "others on the GPU", "fail", "90000 MiB", "end"),
    (put("nvidia-smi", programs=[["GPU-1", "812", "python", 900]]), "others on the GPU", "slow", "pid 812", "CUDA_VISIBLE_DEVICES"),
    (lambda facts, later: facts[1]["nvidia-smi"]["listed"][0].update(name="A100"), "gpus", "slow", "A100", ""),
    (put("nvidia-smi", fabric="In Progress"), "NVSwitch fabric", "fail", "In Progress", "nvidia-fabricmanager"),
    (put("limits", shm=64 * MIB, shm_free=64 * MIB), "/dev/shm", "fail", "64.0 MiB free", "--shm-size"),
    (put("limits", memlock=64 * 1024), "ulimit -l", "fail", "64.0 KiB", "memlock=-1"),
    (put("limits", nofile=256), "ulimit -n", "fail", "256", "ulimit -n"),
    (put("limits", container="container"), "container", "note", "container", "--ipc=host"),
    (put("settings", NCCL_P2P_LEVEL=("LOC", "/etc/nccl.conf")), "variable", "fail", "LOC from /etc/nccl.conf on rank 1", "every rank"),
    (settings_on_both("NCCL_P2P_DISABLE", "1"), "variable", "slow", "host memory", "unset NCCL_P2P_DISABLE"),
    (settings_on_both("NCCL_P2P_DISABLE", "0"), "variable", "note", "host memory", ""),
    (put("settings", NCCL_SOCKET_IFNAME=("ens", "environment")), "interface", "fail", "leaves none", "eth0"),
    (put("network", interfaces=[["docker0", "172.17.0.1", True]]), "interface", "fail", "docker0", "reaches the other"),
    (put("network", resolved=["127.0.1.1"]), "hostname", "fail", "127.0.1.1", "/etc/hosts"),
    (put("network", rdma=[]), "RDMA", "fail", "different numbers", "NCCL_IB_HCA"),
    (put("network", rdma=[["mlx5_0/1", "1: DOWN", "400 Gb/sec", "InfiniBand"]]), "RDMA", "note", "not active", "ibstat"),
    (put("machine", cores=1, local_world_size=4), "cores", "slow", "1 for 4 ranks", "--nproc_per_node=1"),
    (put("machine", acs=["00:01.0"]), "ACS", "note", "00:01.0", "setpci"),
    (put("machine", iommu=2), "IOMMU", "note", "iommu=pt", "BIOS"),
    (put("machine", peermem=False), "GPUDirect", "slow", "nvidia_peermem", "modprobe"),
    (put("disk", free=1 * GIB), "disk", "fail", "1.0 GiB free", "--out"),
    (put("disk", writable=False), "disk", "fail", "not writable", "--out"),
    (lambda facts, later: facts[1].update(disk={"error": "no answer within 20 s", "hangs": True}), "disk", "fail", "no answer", "file system"),
    (lambda facts, later: facts[1].update(machine={"error": "OSError: x"}), "machine", "unknown", "OSError", ""),
    (lambda facts, later: facts.pop(1) and later.clear(), "ranks", "fail", "rank 1 did not answer", "--nnodes"),
    (report(reach={"0": {"error": "No route to host", "address": "192.0.2.0"}}), "reach", "fail", "node-1 does not reach node-0", "TCP"),
    (report(reach={"error": "OSError: Cannot assign"}), "reach", "fail", "node-1", "address"),
    (report(reach={"0": {"skew": -90.0, "rtt": 0.01, "address": "a"}}), "clock", "note", "-90.0 s", "chrony"),
    (report(copy={"copies": [{"from": 0, "to": 1, "error": "no answer within 30 s"}]}), "copies", "fail", "0 to 1 no answer", "NCCL_P2P_DISABLE=1"),
    (report(copy={"copies": [{"from": 0, "to": 1, "peer": True, "right": False, "gb_per_s": 9}]}), "copies", "fail", "arrives changed", "ACS"),
    (report(collectives={"error": "no answer within 120 s"}), "collectives", "fail", "no answer", "NCCL_P2P_DISABLE=1"),
    (row_is_wrong, "collectives", "fail", "all-gather gave a wrong result", "driver"),
    (lambda facts, later: later.pop(1), "collectives", "fail", "did not answer on rank 1", ""),
]  # fmt: skip


@pytest.mark.parametrize("change, check, state, said, fix", BROKEN, ids=[f"{row[1]}: {row[3]}" for row in BROKEN])
def test_what_is_broken_is_named_with_its_fix(change, check, state, said, fix):
    results = judged(change)
    assert [
        one for one in results if one.check == check and one.state == state and said in one.found and fix in one.fix
    ], results
    assert state == "fail" or not any(one.state == "fail" for one in results), results


def test_copies_of_unequal_speed_are_a_note():
    rows = [
        {"from": 0, "to": b, "peer": True, "right": True, "gb_per_s": speed} for b, speed in ((1, 300.0), (2, 12.0))
    ]
    (one,) = doctor.judge_copies(rows, "node-a")
    assert one.state == "note" and "0 to 2" in one.found
    (one,) = doctor.judge_copies(rows[:1], "node-a")
    assert one.state == "ok" and "1 of them direct" in one.found


def test_bandwidth_is_compared_with_what_the_link_should_give():
    assert doctor.bus_bandwidth("all-reduce", 8e9, 1.0, 8) == pytest.approx(14.0)  # 2 x 7/8 x 8
    assert doctor.bus_bandwidth("all-gather", 8e9, 2.0, 4) == pytest.approx(3.0)
    assert doctor.bus_bandwidth("send/recv", 8e9, 2.0, 4) == pytest.approx(4.0)
    assert doctor.expected_bandwidth("P2P/CUMEM", "NV18", 0) == 216
    assert doctor.expected_bandwidth("P2P/CUMEM", "SYS", 0) == 8
    assert doctor.expected_bandwidth("NET/IB/GDRDMA", "", 400) == 2 * doctor.expected_bandwidth("NET/IB", "", 400) == 40
    assert doctor.expected_bandwidth("NET/Socket", "", 0) is None
    rows = [
        {"operation": "all-reduce", "bytes": amount, "gb_per_s": speed} for amount, speed in ((4096, 0.1), (MIB, 4.0))
    ]
    assert doctor.judge_bandwidth(rows, "SHM/direct/direct", 5.0)[0].state == "ok"
    assert doctor.judge_bandwidth(rows, "P2P/CUMEM", 216.0)[0].state == "slow"


def test_the_path_is_taken_from_nccls_own_lines():
    head = "node-a:61{0}:61{0} [{0}] NCCL INFO "
    log = "".join(
        head.format(rank) + f"comm 0x1 rank {rank} nranks 2 cudaDev {rank} nvmlDev {rank} busId {rank}0 commId 0x9 - Init COMPLETE\n"
        + head.format(rank) + f"Channel 00 : {rank}[{rank}] -> {1 - rank}[{1 - rank}] via SHM/direct/direct\n"
        for rank in (0, 1)
    )  # fmt: skip
    transport, said = doctor.read_logs({0: {"log": log}, 1: {"error": "x"}})
    assert transport == "SHM/direct/direct" and [one.check for one in said] == ["p2p-unavailable"]
    assert doctor.read_logs({0: {"log": ""}}) == ("", [])


# ── measuring ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_check_that_hangs_or_raises_ends_in_time():
    started = time.monotonic()
    assert "no answer within 0.2 s" in doctor.within(0.2, time.sleep, 5)["error"]
    assert time.monotonic() - started < 2
    assert doctor.within(5, dict, [("a", 1)]) == {"a": 1}
    assert doctor.within(5, lambda: 1 / 0) == {"error": "ZeroDivisionError: division by zero"}


COPIER = """
import json, sys, time
for pair in sys.argv[1].split(","):
    a, b = map(int, pair.split(":"))
    print(json.dumps({"from": a, "to": b, "begins": True}), flush=True)
    if (a, b) == (0, 1): time.sleep(60)
    if (a, b) == (1, 0): sys.exit(3)
    print(json.dumps({"from": a, "to": b, "peer": True, "right": True, "gb_per_s": 9.0}), flush=True)
"""


def test_a_copy_that_hangs_or_dies_costs_only_its_pair():
    found = doctor.watch_copies([(0, 1), (0, 2), (1, 0), (2, 0)], 1.5, [sys.executable, "-c", COPIER])["copies"]
    errors = {(row["from"], row["to"]): row.get("error") for row in found}
    assert errors == {
        (0, 1): "no answer within 1.5 s",
        (0, 2): None,
        (1, 0): "the copying process ended with code 3",
        (2, 0): None,
    }


def test_hosts_connect_and_one_that_does_not_listen_is_named():
    store, found = dist.HashStore(), {}

    def host(node):
        found[node] = doctor.reach(store, node, [0, 1, 2], "127.0.0.1", seconds=2)

    threads = [threading.Thread(target=host, args=(node,)) for node in (0, 1)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert "error" not in found[0]["1"] and abs(found[1]["0"]["skew"]) < 1
    store.set("doctor/listens/0", store.get("doctor/listens/1"))  # as when both hosts use one bridge address
    assert doctor.reach(store, 5, [0], "127.0.0.1", seconds=2)["0"]["error"] == "another host answers there"
    assert found[0]["2"]["error"] == found[1]["2"]["error"] == "it did not listen"


# ── whole runs ───────────────────────────────────────────────────────────────────────────────────────────────────────
def examine(*flags, cwd, env=None):
    return end(start(2, *flags, script="tools/doctor.py", cwd=cwd, env=env))


def test_two_ranks_on_this_machine_are_fit(tmp_path):
    ended = examine("--json", "--disk", "0.001", cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": ""})
    assert ended.rc == 0, ended.out + ended.err
    said = json.loads(ended.out)
    assert said["fit"] and said["ranks"] == 2
    checks = {one["check"]: one["state"] for one in said["checks"]}
    assert checks["collectives"] == checks["reach"] == checks["software"] == "ok"
    assert {row["operation"] for row in said["bandwidth"]} == {"all-reduce", "all-gather", "send/recv"}
    assert all(row["gb_per_s"] > 0 for row in said["bandwidth"])


FAKE = """#!/bin/sh
case "$*" in
*query-gpu*) echo "0, GPU-aa, NVIDIA H200, 143771, 4, 580.82" ;;
esac
"""


def test_everything_that_is_wrong_is_named_in_one_run(tmp_path):
    """An interface that does not exist, a full disk, and GPUs that the driver shows but torch cannot use."""
    (tmp_path / "nvidia-smi").write_text(FAKE)
    (tmp_path / "nvidia-smi").chmod(0o755)
    env = {"GLOO_SOCKET_IFNAME": "nosuch", "CUDA_VISIBLE_DEVICES": "none", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = examine("--disk", "1e9", cwd=tmp_path, env=env)
    assert ended.rc == 1
    failed = {line.split()[1]: line for line in ended.out.splitlines() if line.startswith("fail")}
    assert list(failed) == ["gpus", "interface", "disk", "collectives"], ended.out
    assert "torch sees none" in failed["gpus"] and os.fspath(tmp_path) in failed["disk"]
    assert "nosuch" in failed["interface"] and "nosuch" in failed["collectives"]
    assert ended.out.count("  do: ") >= 4 and "not fit: 4 checks failed" in ended.out
