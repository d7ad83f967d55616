# Makes a node the controller of a Slurm cluster, as a site has one.
set -eu
mkdir -p /var/lib/slurm/slurmctld /var/log/slurm
cat >/etc/slurm/slurm.conf <<EOF
ClusterName=site
SlurmctldHost=$(hostname)
SlurmUser=slurm
AuthType=auth/munge
CredType=cred/munge
SlurmctldParameters=enable_configless
MaxNodeCount=16
TreeWidth=65533
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
GresTypes=gpu
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
SlurmdTimeout=30
NodeName=n4 CPUs=1 RealMemory=500 Gres=gpu:h100:4 Feature=mw State=UNKNOWN
NodeName=n5 CPUs=1 RealMemory=500 Gres=gpu:h100:2 Feature=mw State=UNKNOWN
NodeSet=mw Feature=mw
PartitionName=gpu Nodes=mw Default=YES MaxTime=INFINITE State=UP
EOF
for n in n4 n5; do # those that the testbed has
    getent hosts $n >/dev/null || sed -i "/^NodeName=$n /d" /etc/slurm/slurm.conf
done
cat >/etc/slurm/gres.conf <<'EOF'
Name=gpu Type=h100 File=/dev/mwgpu[0-1]
EOF
chown -R slurm: /var/lib/slurm /var/log/slurm
rm -f /etc/munge/munge.key
install -o munge -g munge -m 0400 /dev/null /etc/munge/munge.key
head -c 128 /dev/urandom >/etc/munge/munge.key
systemctl enable --now munge.service slurmctld.service
