// What the page knows and shows.

export const state = { view: null, connected: false, lost: null, problem: '', selected: null, allPods: false };

export const isOfPod = () => state.view?.kind === 'pod';
