#!/bin/sh
# The job itself: it runs each call that is put into calls/, and so all of the run's processes are its children, which
# Slurm ends with it. A call is a folder: NAME.go has its command and its input, NAME.done its outputs and its end.
# While nothing trains it ends by itself once nobody has called for a while: no node is held for a lost laptop, and what
# was trained lies in FOLDER.
# usage: pilot.sh FOLDER TENTHS-OF-A-SECOND SETUP
umask 077
cd -- "$1" || exit 1
# Requeued by an admin, or submitted twice, it would train a second time, under a lease that nobody counts.
mkdir begun || exit 1
idle=0 most=$2
eval "$3"
mkdir -p calls
one() {
    sh "$1/call" <"$1/in" >"$1/out" 2>"$1/err"
    echo "$?" >"$1/code"
    mv -- "$1" "${1%.run}.done"
}
while [ -d calls ]; do
    for go in calls/*.go; do
        run="${go%.go}.run"
        if [ -d "$go" ] && mv -- "$go" "$run"; then
            one "$run" &
        fi
    done
    for run in calls/*.run; do
        if [ -d "$run" ]; then idle=0; fi
    done
    idle=$((idle + 1))
    if [ "$idle" -gt "$most" ] && { ! [ -e agent/job.json ] || [ -e agent/exit.json ]; }; then exit 0; fi
    sleep 0.1
done
