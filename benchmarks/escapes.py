"""Programs that try to leave a sandbox, or to exceed its limits, for `sandbox.py`.

Each is Python source, with `world` (targets on the host), `token` (the secret in all of them) and `won()`,
which reports a success. Without a sandbox each succeeds, so that a missing protection would be found.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PRELUDE = """
import ctypes, errno, glob, json, os, resource, signal, socket, subprocess, sys, time
world = json.loads(os.environ["WORLD"])
token = world["token"]
libc = ctypes.CDLL(None, use_errno=True)
def won(): print("ESCAPED", flush=True)
def has(path):
    if token in open(path, errors="replace").read(): won()
def call(number, *arguments):
    "Calls the kernel; returns whether it was permitted, with any other error."
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(one) if isinstance(one, int) else one
                                                   for one in arguments])
    return result >= 0 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS, errno.EACCES)
def writable(path):
    os.close(os.open(path, os.O_WRONLY)); won()
def get(url):
    import urllib.request
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    if token in opener.open(url, timeout=3).read().decode(): won()
"""
NONE, RAW = "none", "raw"


@dataclass(frozen=True)
class Attempt:
    """A program, and the place where it must succeed."""

    name: str
    program: str
    control: str = NONE
    """`none`: a sandbox of that backend; `raw`: an ordinary process."""
    check: str = "output"
    """Who sees the success: the program (`output`), the host, by its `victim`, `survivor` or `supervisor`."""
    limits: dict[str, float] = field(default_factory=dict)
    timeout_s: float = 10.0
    loose_s: float = 20.0
    """Timeout without protection."""


NETWORK = [
    Attempt("connect to a loopback port of the host", "get(world['url'] + '/control')"),
    Attempt("connect by IPv6", "get(world['url6'] + '/control')"),
    Attempt("connect to another address", "get(world['address'] + '/control')"),
    Attempt("the gateway's control plane", "get(world['reach'].partition('/s/')[0] + '/control/sessions')"),
    Attempt("the control plane by dots", """
where, host = world['reach'].partition('/s/')[0], world['reach'].split('/')[2]
for path in ('/s/mine/../../control', '/s/mine/%2e%2e/%2e%2e/control', '//control', '/v1/../control'):
    name, _, port = host.partition(':')
    with socket.create_connection((name, int(port)), 3) as s:
        s.sendall(f'GET {path} HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n'.encode())
        data = b''.join(iter(lambda: s.recv(65536), b''))
    if token.encode() in data: won()
"""),
    Attempt("the control plane behind a permitted request", """
name, _, port = world['reach'].split('/')[2].partition(':')
with socket.create_connection((name, int(port)), 3) as s:
    s.sendall(b'GET /s/mine/v1/models HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n'
              b'GET /control HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n')
    data = b''.join(iter(lambda: s.recv(65536), b''))
if data.count(token.encode()) > 1: won()
"""),
    Attempt("another session of the gateway", "get(world['reach'].replace('mine', 'other') + '/models')"),
    Attempt("the gateway as a proxy to another address", """
name, _, port = world['reach'].split('/')[2].partition(':')
with socket.create_connection((name, int(port)), 3) as s:
    s.sendall(f"GET {world['url']}/control HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n".encode())
    data = b''.join(iter(lambda: s.recv(65536), b''))
if token.encode() in data: won()
"""),
    Attempt("a datagram to the host", """
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(2)
s.sendto(b'hello', ('127.0.0.1', world['udp']))
if token in s.recv(1000).decode(): won()
"""),
    Attempt("a raw socket", "socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP); won()"),
    Attempt("a packet socket", "socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3); won()"),
    Attempt("a socket to the hypervisor", "socket.socket(40, socket.SOCK_STREAM); won()"),
    Attempt("an abstract Unix socket of the host", """
s = socket.socket(socket.AF_UNIX); s.connect('\\0' + world['abstract'])
if token in s.recv(1000).decode(): won()
"""),
    Attempt("a Unix socket in the host's files", """
s = socket.socket(socket.AF_UNIX); s.connect(world['socket'])
if token in s.recv(1000).decode(): won()
"""),
]  # fmt: skip

FILES = [
    Attempt("read a file of the host", "has(world['file'])"),
    Attempt("read it by the root of a process", "has(f'/proc/{world[\"victim\"]}/root' + world['file'])"),
    Attempt("read it by the supervisor's root", "has(f'/proc/{os.getppid()}/root' + world['file'])"),
    Attempt("read it by a link", "os.symlink(world['file'], 'link'); has('link')"),
    Attempt("read /etc/shadow", "open('/etc/shadow').read(); won()"),
    Attempt("list /root", "os.listdir('/root') and os.path.exists('/root/.bashrc') and won()"),
    Attempt("read the host's /dev/shm", "has(world['shm'])"),
    Attempt("read the files of another sandbox", """
for folder, _, names in os.walk('/'):
    if folder.startswith(('/proc', '/sys', '/usr', '/lib')): continue
    for name in names:
        if name == world['other_file']: has(os.path.join(folder, name))
"""),
    Attempt("write a file of the host", "open(world['file'], 'a').close(); won()"),
    Attempt("write to /usr", "open('/usr/local/bin/tidegate-probe', 'w').close(); "
            "os.remove('/usr/local/bin/tidegate-probe'); won()"),
    Attempt("write to /etc/passwd", "writable('/etc/passwd')"),
    Attempt("write to /", "os.mkdir('/tidegate-probe'); os.rmdir('/tidegate-probe'); won()"),
    Attempt("write to the supervisor's code", "writable(world['code'])"),
    Attempt("write to /proc/sys", "writable('/proc/sys/kernel/core_pattern')"),
    Attempt("read the kernel's memory", "os.read(os.open('/proc/kpagecount', os.O_RDONLY), 8); won()"),
    Attempt("read the kernel's log", "call(103, 3, ctypes.create_string_buffer(9), 9) and won()"),
    Attempt("see /sys", "os.listdir('/sys/kernel') and won()"),
    Attempt("make a control group", "os.mkdir(world['cgroup']); os.rmdir(world['cgroup']); won()"),
]  # fmt: skip

PROCESSES = [
    Attempt("see a process of the host", """
for path in glob.glob('/proc/[0-9]*/cmdline'):
    if world['marker'] in open(path).read(): won()
"""),
    Attempt("see a process of another sandbox", """
for path in glob.glob('/proc/[0-9]*/cmdline'):
    if world['other_marker'] in open(path).read(): won()
"""),
    Attempt("kill a process of the host", "os.kill(world['victim'], signal.SIGKILL)", check="victim"),
    Attempt("kill every process in sight", """
for path in glob.glob('/proc/[0-9]*/cmdline'):
    if world['marker'] in open(path).read(): os.kill(int(path.split('/')[2]), 9)
    if path == '/proc/1/cmdline' and os.getppid() == 1: os.kill(-1, 9)
""", check="victim"),
    Attempt("kill the supervisor", "os.kill(os.getppid(), 9)", check="supervisor"),
    Attempt("stop the supervisor", "os.kill(os.getppid(), signal.SIGSTOP)", check="supervisor", loose_s=1),
    Attempt("trace the supervisor", "libc.ptrace(0x4206, os.getppid(), 0, 0) == 0 and won()"),
    Attempt("trace a process of the host", "libc.ptrace(0x4206, world['victim'], 0, 0) == 0 and won()"),
    Attempt("read the supervisor's memory", "os.open(f'/proc/{os.getppid()}/mem', os.O_RDWR); won()"),
    Attempt("open the supervisor's socket", "os.readlink(f'/proc/{os.getppid()}/fd/0') and won()"),
    Attempt("take the supervisor's socket", "call(438, os.pidfd_open(os.getppid()), 0, 0) and won()"),
    Attempt("read the environment of the host's processes", """
for path in glob.glob('/proc/[0-9]*/environ'):
    try:
        if world['secret_name'] + '=' + token in open(path, errors='replace').read(): won()
    except OSError: pass
"""),
    Attempt("environment of the host", "os.environ.get(world['secret_name']) == token and won()", RAW),
    Attempt("inherited descriptors", """
for name in os.listdir('/proc/self/fd'):
    try: text = os.pread(int(name), 1000, 0)
    except OSError: continue
    if token.encode() in text: won()
""", RAW),
    Attempt("shared memory of the host", """
found = libc.shmget(world['shm_key'], 0, 0)
libc.shmat.restype = ctypes.c_void_p
if found >= 0 and token.encode() in ctypes.string_at(libc.shmat(found, None, 0o10000), 64): won()
"""),
    Attempt("processes after the end", """
for number in range(4):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGHUP, signal.SIG_IGN)
            for end in range(3): os.dup2(os.open('/dev/null', os.O_RDWR), end)
            os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)', world['survivor']])
        os._exit(0)
""", RAW, check="survivor"),
]  # fmt: skip

RIGHTS = [
    Attempt("be root", "os.setuid(0); os.getuid() == 0 and won()"),
    Attempt("have capabilities", """
caps = [line.split()[1] for line in open('/proc/self/status') if line.startswith(('CapEff', 'CapPrm'))]
any(int(one, 16) for one in caps) and won()
"""),
    Attempt("a setuid program", """
import shutil
shutil.copy(sys.executable if os.path.exists(sys.executable) else '/bin/sh', 'program')
os.chown('program', 0, 0); os.chmod('program', 0o4755)
os.stat('program').st_uid == 0 and os.stat('program').st_mode & 0o4000 and won()
"""),
    Attempt("a program that is setuid on the host", """
out = subprocess.run(['su', '-c', 'id -u', 'root'], capture_output=True, text=True, stdin=subprocess.DEVNULL)
out.stdout.strip() == '0' and won()
"""),
    Attempt("mount a file system", """
os.mkdir('m'); libc.mount(b'none', b'm', b'tmpfs', 0, None) == 0 and (libc.umount(b'm'), won())
"""),
    Attempt("mount /usr writable", """
os.mkdir('m'); libc.mount(b'/usr', b'm', None, 4096, None) == 0 and (libc.umount(b'm'), won())
"""),
    Attempt("change the root", "os.mkdir('r'); os.chroot('r'); won()"),
    Attempt("make a device", "os.mknod('disk', 0o60600, os.makedev(254, 0)); won()"),
    Attempt("a new user namespace", "libc.unshare(0x10000000) == 0 and won()"),
    Attempt("a new user namespace by clone", """
pid = libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)
if pid == 0: os._exit(0)
if pid > 0: os.waitpid(pid, 0); won()
"""),
    Attempt("a new network namespace", "libc.unshare(0x40000000) == 0 and won()"),
    Attempt("enter another namespace", """
for path in (f"/proc/{world['victim']}/ns/uts", f'/proc/{os.getppid()}/ns/uts', '/proc/1/ns/uts'):
    try: where = os.open(path, os.O_RDONLY)
    except OSError: continue
    if libc.setns(where, 0) == 0: won()
"""),
    Attempt("set the host's name", "socket.sethostname(socket.gethostname()); won()"),
    Attempt("load a bpf program", "call(321, 0, 0, 0) and won()"),
    Attempt("performance counters of the kernel", "call(298, 0, -1, 0, -1, 0) and won()"),
    Attempt("handle page faults", "call(323, 0) and won()"),
    Attempt("keys of the kernel", "call(248, b'user', b'tidegate', b'x', 1, -3) and won()"),
    Attempt("open a file by its handle", "call(304, -1, ctypes.create_string_buffer(64), 0) and won()"),
    Attempt("real-time priority", "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)); won()"),
    Attempt("a higher priority", "os.nice(-5); won()"),
    Attempt("raise a limit", """
try: resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096)); won()
except ValueError as error: print(error)
""", RAW),
]  # fmt: skip

BOMBS = [
    Attempt("a fork bomb", """
made = 0
while made < 400:
    if os.fork() == 0: time.sleep(30); os._exit(0)
    made += 1
won()
""", limits={"processes": 64}),
    Attempt("a bomb of threads", """
import threading
for number in range(300): threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
won(); os._exit(0)
""", limits={"processes": 64}),
    Attempt("memory of one process", "x = b'x' * 500_000_000; won()", limits={"memory_mb": 256}),
    Attempt("memory of many processes", """
reader, writer = os.pipe()
for number in range(6):
    if os.fork() == 0:
        x = b'x' * 100_000_000; os.write(writer, b'1'); time.sleep(30); os._exit(0)
got = b''
while len(got) < 6: got += os.read(reader, 6)
time.sleep(0.5); won()
""", limits={"memory_mb": 256}),
    Attempt("shared memory of one process", """
import mmap
maps = [mmap.mmap(-1, 100 << 20) for _ in range(6)]
for one in maps: one.write(b'x' * (100 << 20)); time.sleep(0.05)
won()
""", limits={"memory_mb": 256}),
    Attempt("memory without a process", """
files = [os.memfd_create('x') for _ in range(6)]
for one in files: os.write(one, b'x' * (100 << 20))
won()
""", limits={"memory_mb": 256, "disk_mb": 128}),
    Attempt("a full disk", """
with open('big', 'wb') as file:
    for number in range(40): file.write(b'x' * 10_000_000)
won()
""", limits={"disk_mb": 64}),
    Attempt("a full disk of many files", """
names = [f"{('/tmp', '.')[number % 2]}/tidegate-probe-{number}" for number in range(40)]
for name in names:
    with open(name, 'wb') as file: file.write(b'x' * 10_000_000)
    time.sleep(0.02)
for name in names: os.remove(name)
won()
""", limits={"disk_mb": 128}),
    Attempt("empty files without end", """
for number in range(140_000): os.close(os.open(f'f{number}', os.O_CREAT | os.O_WRONLY))
won()
""", timeout_s=30, loose_s=60),
    Attempt("output without end", "print('x' * 300_000); won()", limits={"output_bytes": 65_536}),
    Attempt("more time than is allowed", """
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
time.sleep(2); won()
""", timeout_s=0.5),
    Attempt("more processor time than is allowed", """
began = time.process_time()
while time.process_time() - began < 2.5: pass
won()
""", limits={"cpu_s": 1}),
]  # fmt: skip

ATTEMPTS = [*NETWORK, *FILES, *PROCESSES, *RIGHTS, *BOMBS]
