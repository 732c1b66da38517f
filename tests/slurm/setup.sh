#!/bin/bash
# A SLURM cluster of one machine, with accounting, for tests: installs Debian's packages and starts the daemons.
#
#     sudo tests/slurm/setup.sh          # exits with 0 when a job has run; safe to repeat
#     sudo tests/slurm/setup.sh stop     # stops the daemons
#
# Everything listens on the loopback address only, with files in /etc/slurm and /var/lib/slurm-test.
set -euo pipefail

export PATH=$PATH:/usr/sbin:/sbin
STATE=/var/lib/slurm-test
CORES=$(nproc)
DAEMONS="slurmd slurmctld slurmdbd mariadbd munged"

stop() {
    for name in $DAEMONS; do
        if running "$name"; then
            pid=$(cat "$STATE/$name.started")
            kill "$pid"
            for _ in $(seq 40); do # slurmd waits for running jobs
                kill -0 "$pid" 2>/dev/null || break
                sleep 0.25
            done
            kill -9 "$pid" 2>/dev/null || true
            echo "stopped $name"
        fi
        rm -f "$STATE/$name.started"
    done
}

running() { [ -f "$STATE/$1.started" ] && kill -0 "$(cat "$STATE/$1.started")" 2>/dev/null; }

wait_for() { # NAME COMMAND...: until the command succeeds, a minute at most
    local name=$1
    shift
    for _ in $(seq 120); do
        if "$@" >/dev/null 2>&1; then return 0; fi
        sleep 0.5
    done
    echo "error: $name does not answer; look into $STATE/*.log" >&2
    exit 1
}

launch() { # NAME COMMAND...: in the background, unless it runs already; the command must stay in the foreground
    local name=$1
    shift
    if running "$name"; then return 0; fi
    setsid "$@" >>"$STATE/$name.log" 2>&1 </dev/null &
    echo $! >"$STATE/$name.started"
}

if [ "$(id -u)" -ne 0 ]; then
    echo "error: this starts daemons and must be run by root" >&2
    exit 1
fi
if [ "${1:-}" = stop ]; then
    stop
    exit 0
fi
missing=
for name in $DAEMONS; do
    command -v "$name" >/dev/null || missing="$missing $name"
done
if [ -n "$missing" ]; then
    if ! command -v apt-get >/dev/null; then
        echo "error: not installed:$missing; and this machine has no apt-get to install it" >&2
        exit 1
    fi
    export DEBIAN_FRONTEND=noninteractive
    # Keep the packages from starting their services; they are started below.
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d.slurm-test
    chmod +x /usr/sbin/policy-rc.d.slurm-test
    [ -e /usr/sbin/policy-rc.d ] || ln -s policy-rc.d.slurm-test /usr/sbin/policy-rc.d
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends slurm-wlm munge slurmdbd mariadb-server >/dev/null
    [ "$(readlink /usr/sbin/policy-rc.d)" != policy-rc.d.slurm-test ] || rm /usr/sbin/policy-rc.d
    rm -f /usr/sbin/policy-rc.d.slurm-test
fi

mkdir -p "$STATE"/{state,spool,mysql} /etc/slurm
MEMORY=$(awk '/MemTotal/ {print int($2 / 1024 * 0.9)}' /proc/meminfo)
cat >/etc/slurm/slurm.conf <<CONF
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
# A requeued job starts after seconds, not minutes.
AuthInfo=cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
KillWait=30
StateSaveLocation=$STATE/state
SlurmdSpoolDir=$STATE/spool
SlurmctldPidFile=$STATE/slurmctld.pid
SlurmdPidFile=$STATE/slurmd.pid
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
JobAcctGatherType=jobacct_gather/none
NodeName=localhost NodeAddr=127.0.0.1 CPUs=$CORES RealMemory=$MEMORY State=UNKNOWN
PartitionName=main Nodes=localhost Default=YES MaxTime=INFINITE State=UP
PartitionName=other Nodes=localhost MaxTime=INFINITE State=UP
CONF
cat >/etc/slurm/slurmdbd.conf <<CONF
DbdHost=localhost
DbdAddr=127.0.0.1
SlurmUser=root
AuthType=auth/munge
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
PidFile=$STATE/slurmdbd.pid
CommunicationParameters=NoInAddrAny
CONF
chmod 600 /etc/slurm/slurmdbd.conf

if [ ! -s /etc/munge/munge.key ]; then
    dd if=/dev/urandom of=/etc/munge/munge.key bs=1024 count=1 status=none
fi
mkdir -p /run/munge /run/mysqld
chown munge:munge /etc/munge/munge.key /run/munge
chmod 400 /etc/munge/munge.key
chmod 755 /run/munge
chown -R mysql:mysql "$STATE/mysql" /run/mysqld

if ! munge -n 2>/dev/null | unmunge >/dev/null 2>&1; then
    launch munged setpriv --reuid=munge --regid=munge --clear-groups munged --foreground --force
    wait_for munged bash -c "munge -n | unmunge"
fi
if [ ! -d "$STATE/mysql/mysql" ]; then
    mariadb-install-db --user=mysql --datadir="$STATE/mysql" >/dev/null
fi
if ! running mariadbd; then
    launch mariadbd mariadbd --user=mysql --datadir="$STATE/mysql" --skip-networking
    wait_for mariadbd mariadb -e "select 1"
fi
launch slurmdbd slurmdbd -D
wait_for slurmdbd sacctmgr --immediate --noheader list cluster
sacctmgr --immediate --quiet add cluster test >/dev/null 2>&1 || true # already exists the second time
launch slurmctld slurmctld -D
wait_for slurmctld scontrol ping
launch slurmd slurmd -D -N localhost
wait_for slurmd srun --immediate=30 --ntasks=1 true
echo "SLURM $(sinfo --version | cut -d' ' -f2) on $CORES cores, on the loopback address"
