// The page of a node, a cluster or a pod: it draws /api/v1/view, again at each line of /api/v1/changes.

import './input.js';
import { follow } from './server.js';

follow();
