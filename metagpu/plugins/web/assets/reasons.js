// Why a GPU or a node needs attention.

import { clock, gib, slotOf } from './words.js';

/** Return the reasons for which a GPU or a part of it does not serve, or is used without a share. */
export function reasonsOf(gpu, unauthorizedMiB = 0) {
  const found = [];
  const add = (level, word, text, since) => found.push({ level, word, text, since });
  if (!gpu.healthy) {
    const returns = gpu.recovery?.returnsAt;
    if (returns) add('warning', 'recovering', `${gpu.reason}; its checks pass, and it returns at ${clock(returns)}`, gpu.since);
    else if (gpu.recovery) add('error', 'out of service', `${gpu.reason}; it waits for: metagpu acknowledge ${gpu.index}`, gpu.since);
    else add('error', 'out of service', gpu.reason, gpu.since);
  }
  for (const it of gpu.faults ?? []) {
    const where = (it.shares ?? []).map(slotOf).join(', ') || it.device;
    add('error', 'instance out', `MIG device ${where}: ${it.reason}`, it.since);
  }
  if (gpu.cordon) add('warning', 'cordoned', `cordoned: ${gpu.cordon.reason}`, gpu.cordon.since);
  if (gpu.unheard) add('warning', 'unheard', `NVML does not report its XIDs: ${gpu.unheard.reason}`, gpu.unheard.since);
  for (const [backend, it] of Object.entries(gpu.suspended ?? {})) add('warning', 'suspended', `${backend} suspended: ${it.reason}`, it.since);
  for (const [backend, since] of Object.entries(gpu.cleaning ?? {})) add('info', 'cleaning', `${backend} cleans up`, since);
  for (const text of gpu.blocked ?? []) add('warning', 'withheld', text, null);
  if (unauthorizedMiB) add('warning', 'used without a share', `processes without a share use ${gib(unauthorizedMiB)} GiB; mgctl get processes on the node names them`, null);
  if (gpu.waitsFor) add('info', 'waiting', gpu.waitsFor, null);
  return found;
}

/** Return the problems of a node beside those of its GPUs, in the words of `metagpu status`. */
export function problemsOf(status) {
  const found = [];
  const add = (level, text, since = null) => text && found.push({ level, text, since });
  const addAll = (level, named, sentence) => {
    for (const [name, text] of Object.entries(named ?? {})) if (text) add(level, sentence(name, text));
  };
  const { configuration = {}, cluster = {}, dra, cdi, mgctl } = status;
  add('error', configuration.error && `configuration rejected: ${configuration.error}`);
  for (const it of configuration.misfits ?? []) add('warning', `configuration does not fit ${it}`);
  for (const it of status.unreadableGpus ?? []) add('error', `out of service: NVML cannot read it: ${it.reason}`, it.since);
  addAll('error', status.competingPlugins, (name, it) => `${name} is served by another plugin on ${it}`);
  addAll('error', status.registrationProblems, (name, it) => `${name}: ${it}`);
  addAll('error', status.endedTasks, (name, it) => `the main task ${name} of the daemon ended: ${it}`);
  for (const it of status.lostDevices ?? []) add('error', `${it.holder.split(' ')[0]}: ${it.reason}`);
  for (const it of [...(status.leaseDifferences ?? []), ...(status.mixedRequests ?? [])]) add('warning', `${it.holder.split(' ')[0]}: ${it.reason}`);
  if (cluster) {
    add('warning', cluster.problem && `API server: ${cluster.problem}`);
    addAll('warning', cluster.features, (use, it) => `API server, ${use}: ${it}`);
    addAll('warning', cluster.nodeDifferences, (name, it) => `${name}: ${it}`);
    add('warning', cluster.resourceSlices?.problem && `API server, ResourceSlices: ${cluster.resourceSlices.problem}`);
    addAll('warning', cluster.resourceSlices?.contested, (name, it) => `${name}: the device plugin offers it here, and the DeviceClass ${it} has it too`);
    add('info', cluster.driverUpgrade?.summary);
    for (const it of cluster.competingPlugins ?? []) {
      const also = it.contested.length ? `; it may serve ${it.contested.join(', ')} too` : '';
      add('warning', `${it.program} runs on this node: pod ${it.pod}${also}`);
    }
  }
  add('warning', dra?.problem && `DRA driver ${dra.driver}: ${dra.problem}`);
  add('warning', cdi?.problem && `containers may not start: ${cdi.problem}`);
  add('warning', cdi?.noLibraries && `containers get no libraries of the driver by CDI: ${cdi.noLibraries}`);
  add('warning', mgctl?.inPods && mgctl.problem && `containers get no answers from mgctl: ${mgctl.problem}`);
  return found;
}

export const RANK = { error: 0, warning: 1, info: 2 };
