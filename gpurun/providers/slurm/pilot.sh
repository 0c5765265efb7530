#!/bin/sh
# The job itself: it runs each call that is put into calls/, and so all of the run's processes are its children, which
# Slurm ends with it. A call is a folder: NAME.go has its command and its input, NAME.done its outputs and its end.
# While nothing trains it ends by itself once nobody has called for a while: no node is held for a lost laptop, and what
# was trained lies in FOLDER.
# With IMAGE the job's own words run in that, by what is written into in-image; pilot and agent stay outside.
# It has the first line `#!/bin/bash -l` on a cluster with a bash: `module` and conda are functions of a login shell.
# With "nodes" it runs a command on each of the job's nodes at once, which finds in torchrun's variables who leads; with
# "each" the command may be any, is told of a stop by a signal on all nodes, and finds MASTER_ADDR and NODE_RANK as well.
# Of several jobs of one sbatch the first does all that; the others say by hands/K that steps of them can be started
# (remote/agent/runner/hands.py), until the first one's work, or its time, is over.
# usage: pilot.sh FOLDER TENTHS-OF-A-SECOND SETUP IMAGE SECONDS
#        pilot.sh nodes PYTHON WORDS
#        pilot.sh each PYTHON COMMAND
umask 077
if [ "$1" = nodes ] || [ "$1" = each ]; then
    kind=$1
    shift
    . "$(dirname -- "$0")/job.env"
    free='import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'
    PET_MASTER_PORT=$("$1" -c "$free") || exit 1
    export PET_MASTER_PORT PET_NNODES="$SLURM_JOB_NUM_NODES" SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
    [ -n "${SLURM_CPUS_PER_TASK:-}" ] || unset SRUN_CPUS_PER_TASK
    each="srun --export=ALL --mpi=none --nodes=$PET_NNODES --ntasks=$PET_NNODES --ntasks-per-node=1"
    # shellcheck disable=SC2016
    begin='export PET_NODE_RANK="$SLURM_NODEID" PET_MASTER_ADDR="$SLURM_LAUNCH_NODE_IPADDR"; exec "$@"'
    if [ "$kind" = nodes ]; then
        $each --kill-on-bad-exit=1 --wait=0 sh -c "$begin" sh "$@"
        code=$?
    else
        shift
        # shellcheck disable=SC2016
        begin='export MASTER_ADDR="$SLURM_LAUNCH_NODE_IPADDR" MASTER_PORT="$PET_MASTER_PORT" NODE_RANK="$SLURM_NODEID"
            '"$begin"
        # In a session of its own: asked to end itself, srun would kill at once what may have something to save.
        setsid $each --kill-on-bad-exit=1 --wait=0 sh -c "$begin" sh "$@" &
        srun=$!
        for name in TERM INT HUP QUIT USR1 USR2; do
            # shellcheck disable=SC2064
            trap "scancel --signal=$name $SLURM_JOB_ID" "$name"
        done
        while wait "$srun"; code=$?; kill -0 "$srun" 2>/dev/null; do :; done
    fi
    left=60
    # A node that is dead ends the job, once Slurm has noticed: until then this is not told as the command's own end.
    until [ "$code" -eq 0 ] || timeout 30 $each true || [ "$left" -le 0 ]; do
        left=$((left - 1))
        sleep 5
    done
    exit "$code"
fi
cd -- "$1" || exit 1
idle=0 most=$2
hand=${SLURM_ARRAY_TASK_ID:-0}
if [ "$hand" -gt 0 ]; then
    mkdir -p hands && mkdir "hands/$hand.begun" && echo "$SLURM_JOB_ID" >"hands/$hand" || exit 1
    # A shared file system may remember for a minute that a name is not there: so each folder is listed.
    until ls agent 2>/dev/null | grep -qxF exit.json || ls calls 2>/dev/null | grep -qxF leave.run; do
        idle=$((idle + 10))
        if [ -e hands/until ]; then
            [ "$(date +%s)" -lt "$(cat hands/until)" ] || exit 0
        elif [ "$idle" -gt "$most" ]; then
            exit 0
        fi
        sleep 1
    done
    exit 0
fi
# Requeued by an admin, or submitted twice, it would train a second time, under a lease that nobody counts.
mkdir begun || exit 1
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
    mkdir -p hands
    echo "$(($(date +%s) + $5))" >hands/until
    printf '%s\n' "$3" >hands/setup
fi
# A set-up that fails ends the job, and `setup.failed` has its exit code: what would run then would run without it.
trap 'echo "$?" >setup.failed' EXIT
eval "$3" >setup-table.log 2>&1 || exit
enter_image() {
    engine=$(command -v apptainer || command -v singularity) || {
        echo "neither apptainer nor singularity is in the PATH of $(hostname)"
        return 127
    }
    image=$1
    case $image in
        *://*) "$engine" pull image.sif "$image" && image=$(pwd -P)/image.sif || return ;;
    esac
    echo '#!/bin/sh' >in-image
    # Where its binds and its cache are, the agent does not pass on; what may be a password stays out of the file.
    export -p | sed 's/^declare -x /export /' | grep -E '^export (APPTAINER|SINGULARITY)' | grep -v DOCKER_ >>in-image
    echo "exec $engine --silent exec --nv --bind '$(pwd -P)' --pwd \"\$PWD\" '$image' \"\$@\"" >>in-image
    cat >in-image-python <<'end'
#!/bin/sh
# shellcheck disable=SC2016
find='for one in python3 python; do command -v "$one" >/dev/null && exec "$one" "$@"; done
    echo "the image has neither python3 nor python" >&2; exit 127'
exec "$(dirname -- "$0")/in-image" sh -c "$find" sh "$@"
end
    chmod 700 in-image in-image-python
    ./in-image true
}
if [ -n "$4" ]; then
    trap 'echo "$? image" >setup.failed' EXIT
    enter_image "$4" >>setup-table.log 2>&1 || exit
fi
trap - EXIT
# The agent passes none of these on to what it starts. A bash writes `declare -x` for `export`.
export -p | sed 's/^declare -x /export /' | grep -E '^export (SLURM|NCCL|GLOO)' >job.env
mkdir -p calls
one() {
    sh "$1/call" <"$1/in" >"$1/out" 2>"$1/err"
    echo "$?" >"$1/code"
    mv -- "$1" "${1%.run}.done"
}
while [ -d calls ]; do
    for go in calls/*.go; do
        run="${go%.go}.run"
        # What has ended well is asked to leave, not cancelled: so accounting has it as completed.
        if [ "$go" = calls/leave.go ] && mv -- "$go" "$run"; then exit 0; fi
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
