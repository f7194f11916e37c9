"""The look of the page: one style sheet, and the script of the theme switch."""

from __future__ import annotations

from bayesformer.bench.report.colours import colour_sheet


def sheet() -> str:
    """The CSS of the page: colours, marks of charts and layout."""
    return colour_sheet() + MARKS + CSS


SCRIPT = """
(function(){var r=document.documentElement,k='bayesformer-theme',m=matchMedia('(prefers-color-scheme: dark)');
try{var s=localStorage.getItem(k);if(s)r.dataset.theme=s}catch(e){}
function dark(){return r.dataset.theme?r.dataset.theme==='dark':m.matches}
document.addEventListener('DOMContentLoaded',function(){var b=document.getElementById('theme');
function label(){b.textContent=dark()?'Light theme':'Dark theme'}
b.hidden=false;label();m.addEventListener('change',label);
b.addEventListener('click',function(){r.dataset.theme=dark()?'light':'dark';label();
try{localStorage.setItem(k,r.dataset.theme)}catch(e){}})})})()
"""

MARKS = """
.plot{display:block;width:100%;height:auto;overflow:visible}
.plot text{font-size:10px;fill:var(--muted);font-variant-numeric:tabular-nums}
.plot .end{text-anchor:end}.plot .middle{text-anchor:middle}
.plot .grid{stroke:var(--line);stroke-width:.7}
.plot .axis{stroke:var(--faint);stroke-width:1}
.plot .frame{fill:var(--panel)}
.plot .halo{stroke:var(--bg);stroke-width:3;paint-order:stroke;stroke-linejoin:round;fill:var(--ink)}
.stroke,.thin,.guide,.ink{fill:none;stroke-linejoin:round;stroke-linecap:round}
.stroke{stroke:var(--c);stroke-width:1.8}
.thin{stroke:var(--c);stroke-width:1.2}
.guide{stroke:var(--muted);stroke-width:1;stroke-dasharray:3 3}
.ink{stroke:var(--ink);stroke-width:.9}
.dash{stroke-dasharray:5 3}.dot{stroke-dasharray:1.5 3}
.fill,.soft,.softer{fill:var(--c)}
.soft{opacity:.2}.softer{opacity:.36}
.inkfill{fill:var(--ink)}
.dots{stroke:var(--c);stroke-linecap:round}.dots.inkfill{stroke:var(--ink)}
"""

CSS = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;scroll-behavior:smooth}
body{margin:0;background:var(--bg);color:var(--ink);overflow-wrap:break-word;font:16px/1.55 system-ui,
-apple-system,"Segoe UI",Roboto,"Helvetica Neue","Liberation Sans",Arial,sans-serif}
header,main,footer{max-width:70rem;margin:0 auto;padding:0 1.25rem}
header{padding-top:2.5rem;position:relative}
h1,h2{font-family:"Iowan Old Style","Palatino Linotype",Palatino,Charter,Georgia,"Liberation Serif",serif;
font-weight:600;line-height:1.15;text-wrap:balance;letter-spacing:-.01em}
h1{font-size:clamp(1.9rem,5vw,2.9rem);margin:.2rem 0 .5rem}
h2{font-size:clamp(1.5rem,3.6vw,2rem);margin:0 0 .6rem}
h3{font-size:1.02rem;font-weight:650;margin:0 0 .5rem}
p,ul{margin:0 0 .9rem;max-width:44rem}
a{color:var(--link);text-decoration-thickness:1px;text-underline-offset:.18em}
:focus-visible{outline:2px solid var(--link);outline-offset:2px}
small{font-size:.82em}
small,footer,figcaption,caption,thead th,.eyebrow,.lede,.fine,#theme,.facts dt,.rank,.arrow,.mark,.key,.thumbs p{
color:var(--muted)}
strong,b{font-weight:700}
dd{margin:0}
dd,.panel-name,.thumbs li{min-width:0;overflow-wrap:anywhere}
section{margin-top:3rem;padding-top:2.25rem;border-top:1px solid var(--line)}
#summary{margin-top:1.75rem}
.eyebrow{font-size:.85rem;letter-spacing:.04em;margin:0}
.lede{font-size:1.05rem}
.note{border-left:3px solid var(--faint);padding:.15rem 0 .15rem .8rem}
.answer{font-size:1.12rem;line-height:1.5}
.fine,figcaption{font-size:.875rem;line-height:1.5;max-width:46rem}
#theme{position:absolute;right:1.25rem;top:1.1rem;padding:.3rem .8rem;font:inherit;font-size:.8rem;
background:none;border:1px solid var(--line);border-radius:99px;cursor:pointer}
#theme:hover{color:var(--ink);border-color:var(--faint)}
.facts{display:grid;grid-template-columns:1fr 1fr;gap:.35rem 2.5rem;margin:1.4rem 0 .8rem;font-size:.9rem}
.facts>div,.methods>div{display:grid;grid-template-columns:5rem 1fr;gap:.8rem;align-items:baseline}
.methods>div{grid-template-columns:minmax(7rem,13rem) 1fr;padding:.3rem 0;font-size:.92rem}
.inline,.key,.thumbs ul{list-style:none;padding:0;margin:0;max-width:none}
.inline,.key{display:flex;flex-wrap:wrap;gap:.1rem 1rem}
details{margin:.4rem 0;max-width:100%}
summary{cursor:pointer;color:var(--link);font-size:.92rem;padding:.15rem 0;width:fit-content}
details[open]>summary{margin-bottom:.6rem}
.guide ul{padding-left:1.1rem;font-size:.92rem}
pre{margin:0 0 1rem;padding:.8rem;background:var(--panel);overflow:auto;max-height:22rem;font-size:.78rem;
line-height:1.4}
.scroll{overflow-x:auto;margin:1.2rem 0;max-width:100%;overscroll-behavior-x:contain}
table{border-collapse:separate;border-spacing:0;min-width:100%;font-size:.9rem;line-height:1.35;
font-variant-numeric:tabular-nums}
caption,thead th{font-size:.82rem}
caption{text-align:left;padding-bottom:.5rem}
th,td{text-align:left;vertical-align:top;padding:.55rem 1rem .55rem 0;border-bottom:1px solid var(--line);
font-weight:400}
thead th{vertical-align:bottom;border-bottom-color:var(--faint);min-width:5rem}
tbody th,thead th:first-child{position:sticky;left:0;z-index:1;background:var(--bg);min-width:7rem}
td,.nowrap{white-space:nowrap}
.words,.names{white-space:normal}
.variant,.help,.failed,.times{display:block;font-weight:400}
.help{max-width:24rem;line-height:1.35}
.doubt{margin:0 0 .5rem;max-width:none}.doubt:last-child{margin:0}
.full tbody th{min-width:10rem}
.failed{color:var(--bad);white-space:normal}
.words{min-width:17rem}
.entry{display:inline-flex;gap:.45rem;align-items:baseline}
.entry,.entry>span,.panel{min-width:0}
th .entry,td .entry,th .entry>span,td .entry>span{min-width:auto}
.names .entry{display:flex}
.shared{position:absolute;width:0;height:0}
.swatch{width:10px;height:10px;flex:none}
.ranked{display:grid;grid-template-columns:1.55rem auto;align-items:baseline;justify-content:start}
.ranked .failed{grid-column:2}
.ranking .baseline>*{background:var(--panel)}
.ranks .mark{margin-left:.3em}
.mark.better,.mark.worse{font-weight:650}
.mark.better{color:var(--good)}.mark.worse{color:var(--bad)}
.rising{color:var(--muted);cursor:help}
.name{display:flex;gap:.45rem}
.forest{width:108px;height:14px;margin-bottom:.15rem}
figure{margin:2.6rem 0 0}
figcaption{margin-top:.7rem}
.panels{display:grid;gap:1.2rem 1.8rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,var(--low)),1fr))}
.panels.small{align-items:end;grid-template-columns:repeat(auto-fill,minmax(0,246px))}
.curves{--low:235px;--high:420px;align-items:end}.curves .panel-name>small{flex-basis:100%}
#opening figure{margin:1.2rem 0 1.6rem}#opening h3{font-size:1.02rem}
.series{--low:235px;--high:345px}.wide{--low:400px;--high:520px}.pair{--low:310px;--high:520px}
.panels.series+.panels.series{margin-top:1.4rem}
.panel{max-width:var(--high,none)}
.panel-name{display:flex;flex-wrap:wrap;justify-content:space-between;align-items:baseline;gap:0 .6rem;
margin:0 0 .3rem;font-size:.86rem}
.panel-name small{font-variant-numeric:tabular-nums}
.panel-name .variant{display:inline;margin-left:.4em}
.key{gap:.2rem 1.3rem;margin-bottom:.9rem;font-size:.84rem}
.key li{display:flex;align-items:center;gap:.45rem}
.key svg{width:22px;height:12px;flex:none}
.thumbs p{margin:.3rem 0 .2rem;font-size:.8rem}
.thumbs ul{display:grid;grid-template-columns:repeat(8,minmax(0,1fr));gap:.4rem;
margin:0 0 .5rem;max-width:27rem}
.thumbs li{gap:.05rem;font-size:.74rem;line-height:1.25;display:flex;flex-direction:column}
.thumbs img{width:100%;height:auto;aspect-ratio:1;image-rendering:pixelated;border-radius:2px}
.thumbs ul.maps{grid-template-columns:repeat(2,minmax(0,1fr))}
.thumbs b{color:var(--bad)}
footer{margin-top:4rem;padding-bottom:3rem;font-size:.85rem}
@media (max-width:40rem){
body{font-size:15px}
header,main,footer{padding-left:1rem;padding-right:1rem}
header{padding-top:3.2rem}
.facts{grid-template-columns:1fr}
.methods>div{grid-template-columns:1fr;gap:.1rem}
section{margin-top:2.5rem;padding-top:1.75rem}
tbody th{max-width:42vw}
.panels.small{gap:1rem .9rem;grid-template-columns:1fr 1fr}}
@media print{#theme{display:none}figure,tr{break-inside:avoid}.scroll{overflow:visible}}
@media (prefers-reduced-motion:reduce){html{scroll-behavior:auto}}
"""
