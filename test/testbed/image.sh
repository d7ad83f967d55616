# Prepares the nodes' image, in a chroot of it.
set -eu

# Timers that would use the network or the disk behind a test's back.
systemctl mask apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer \
	e2scrub_all.timer e2scrub_reap.service fstrim.timer
# Only the storage node serves a volume.
systemctl disable glusterd.service glustereventsd.service
# Only the controller node runs Slurm's controller, and nodes join it by a task.
systemctl disable munge.service slurmctld.service slurmd.service

# Each daemon-reload runs all generators, and a task makes a few of them. These
# look for what a container never has: terminals, arguments of a kernel, disks
# to find or to decrypt. They took a third of the processor in make crash.
mkdir -p /etc/systemd/system-generators
for g in cryptsetup debug getty gpt-auto hibernate-resume integritysetup rc-local run system-update veritysetup; do
	ln -s /dev/null /etc/systemd/system-generators/systemd-$g-generator
done

# The node's first process. nspawn mounts the controllers of version 1 read only,
# and systemd looks once, at its start, which ones it may use.
cat >/usr/local/sbin/testbed-init <<'EOF'
#!/bin/sh
for c in /sys/fs/cgroup/*/; do
	! mountpoint -q "$c" || mount -o remount,rw,bind "$c" || exit 1
done
exec /lib/systemd/systemd
EOF
chmod 755 /usr/local/sbin/testbed-init

mkdir -p /etc/systemd/journald.conf.d /srv/brick
cat >/etc/systemd/journald.conf.d/testbed.conf <<'EOF'
[Journal]
Storage=persistent
SystemMaxUse=64M
RateLimitIntervalSec=0
EOF
rm -rf /var/cache/apt/archives/*.deb /var/log/journal/*
