# Run at every boot, as root: a guard that was handed over before a reboot goes on. It ends by itself if its key is gone.
for script in /home/*/.gpurun/*/guard/guard.sh; do
    [ ! -f "$script" ] || sh "$script" </dev/null >/dev/null 2>&1 &
done
